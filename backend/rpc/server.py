"""The grpc.aio server around an engine: build, start, drain, stop. Imports no MLX."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from backend.config import DRAIN_TIMEOUT_S, MESSAGE_LIMIT_BYTES, ServerConfig, TuningOptions
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.rpc.decoding import RECEIVE_LIMIT_BYTES, DecodingInterceptor
from backend.rpc.inspector import InspectorServicer
from backend.rpc.servicer import BackendServicer, ServedEngine
from backend.rpc.status import StatusInterceptor
from common.address import AddressError, probe_port, probe_socket, socket_path, split_address
from common.rpc.auth import BearerTokenInterceptor
from common.rpc.identity import ModelIdentityInterceptor

SERVICES = tuple(pb.DESCRIPTOR.services_by_name.values())
FLUSH_TIMEOUT_S = 0.5

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", RECEIVE_LIMIT_BYTES),
    # Two servers on one port would share its calls: the second must fail.
    ("grpc.so_reuseport", 0),
    # A client whose machine has vanished sends no FIN: keepalive frees its slot after 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients may ping during a long prefill, which sends nothing.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class BackendServer:
    """Serves one engine; built and used on a running event loop."""

    def __init__(
        self,
        config: ServerConfig,
        engine: ServedEngine,
        tracing: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._address = config.address
        self._engine = engine
        self._health = health.aio.HealthServicer()
        self._health_news: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=_interceptors(config, engine, tracing), options=CHANNEL_OPTIONS
        )
        self._servicer = BackendServicer(engine, TuningOptions.of(max_slots=config.max_slots))
        backend_pb2_grpc.add_BackendServicer_to_server(self._servicer, self._server)
        inspector = InspectorServicer(engine, has_token=bool(config.auth_token))
        backend_pb2_grpc.add_InspectorServicer_to_server(inspector, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        ours = [service.full_name for service in SERVICES]
        names = (*ours, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listen, and return the address, with a free port in place of 0.

        Raises:
            AddressError: The address is malformed, not ours, or taken.
        """
        bound = self._bind()
        await self._server.start()
        self._engine.on_fault(self._note_fault)
        await self._tell_health()
        return bound

    def _bind(self) -> str:
        address = self._address
        path = socket_path(address)
        if path is not None:
            # gRPC would steal the socket from a process that listens there.
            probe_socket(address, path)
            self._server.add_insecure_port(f"unix:{path}")
            return address
        host, port = split_address(address)
        try:
            return f"{host}:{self._server.add_insecure_port(address)}"
        except RuntimeError:
            # gRPC does not say why.
            probe_port(address, host, port)
            raise AddressError(address, "gRPC could not bind it") from None

    async def stop(self) -> None:
        """Refuse new requests, wait a while for running ones, then end them."""
        await self._health.enter_graceful_shutdown()
        await self._engine.close(drain_timeout_s=DRAIN_TIMEOUT_S)
        await self._servicer.close_jobs()
        await self._server.stop(FLUSH_TIMEOUT_S)

    def _note_fault(self) -> None:
        self._health_news = asyncio.create_task(self._tell_health())

    async def _tell_health(self) -> None:
        """Keep the standard health service in line with `Health`, under every name."""
        answer = health_pb2.HealthCheckResponse
        status = answer.NOT_SERVING if self._engine.fault else answer.SERVING
        for name in (health.OVERALL_HEALTH, *(service.full_name for service in SERVICES)):
            await self._health.set(name, status)


def _interceptors(
    config: ServerConfig, engine: ServedEngine, tracing: Sequence[grpc.aio.ServerInterceptor]
) -> list[grpc.aio.ServerInterceptor]:
    """Return the interceptors, the outermost first."""

    def loaded_model() -> str:
        return engine.model.options.model if engine.model else ""

    authentication = [BearerTokenInterceptor(config.auth_token)] if config.auth_token else []
    return [
        *authentication,
        *tracing,
        StatusInterceptor(),
        DecodingInterceptor(*SERVICES),
        ModelIdentityInterceptor(loaded_model),
    ]
