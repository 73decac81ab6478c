"""The services of one engine. Importing them takes longer than starting to listen."""

from collections.abc import Mapping
from types import MappingProxyType

from backend.config import DRAIN_TIMEOUT_S, ServerConfig, TuningOptions
from backend.pb import backend_pb2_grpc
from backend.rpc.inspector import InspectorServicer
from backend.rpc.servicer import BackendServicer, ServedEngine
from common.rpc import LateServices


class Services:
    """What a server offers once it has an engine."""

    def __init__(
        self,
        config: ServerConfig,
        engine: ServedEngine,
        download_environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create the services.

        Args:
            config: Of the process.
            engine: Computes, and owns the model.
            download_environment: Of the downloads of jobs' models; empty for this process's.
        """
        self.engine = engine
        tuning = TuningOptions.of(max_slots=config.max_slots)
        self._backend = BackendServicer(engine, tuning, download_environment)
        self._inspector = InspectorServicer(engine, has_token=bool(config.auth_token))

    @property
    def loaded_model(self) -> str:
        """The name of the loaded model; empty if there is none."""
        return self.engine.model.options.model if self.engine.model else ""

    def add_to(self, late_services: LateServices) -> None:
        """Add the services to a running server."""
        backend_pb2_grpc.add_BackendServicer_to_server(self._backend, late_services)
        backend_pb2_grpc.add_InspectorServicer_to_server(self._inspector, late_services)
        late_services.complete()

    async def close(self) -> None:
        """Refuse new requests, wait a while for running ones, then end them, and all jobs."""
        await self.engine.close(drain_timeout_s=DRAIN_TIMEOUT_S)
        await self._backend.close_jobs()
