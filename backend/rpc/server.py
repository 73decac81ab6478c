"""The grpc.aio server: listen at once, serve an engine, drain, stop. Imports no MLX."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from traceback import clear_frames, format_tb
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from backend import errors
from backend.config import MESSAGE_LIMIT_BYTES, ServerConfig
from backend.pb import backend_pb2 as pb
from backend.rpc.decoding import RECEIVE_LIMIT_BYTES, DecodingInterceptor
from backend.rpc.health import HEALTH_METHOD, Health
from common.address import AddressError, probe_port, probe_socket, socket_path, split_address
from common.rpc import (
    BearerTokenInterceptor,
    Context,
    Continuation,
    FoundHandler,
    LateServices,
    ModelIdentityInterceptor,
    abort,
    surround,
)

if TYPE_CHECKING:
    from backend.rpc.services import Services

STATUS_CODES: dict[type[errors.BackendError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    # Distributed hosts drop the replica on this status: nothing else may use it.
    errors.ModelNotLoadedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RefusedMediumError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.ShuttingDownError: grpc.StatusCode.UNAVAILABLE,
    errors.RequestCancelledError: grpc.StatusCode.ABORTED,
    errors.GenerationFailedError: grpc.StatusCode.INTERNAL,
    errors.EngineFailedError: grpc.StatusCode.INTERNAL,
    errors.EngineDownError: grpc.StatusCode.UNAVAILABLE,
    errors.EngineStuckError: grpc.StatusCode.UNAVAILABLE,
    errors.DeviceLostError: grpc.StatusCode.UNAVAILABLE,
    errors.GroupLostError: grpc.StatusCode.UNAVAILABLE,
    errors.HelperLostError: grpc.StatusCode.UNAVAILABLE,
    errors.ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.UnsupportedModelError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfMemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DownloadError: grpc.StatusCode.UNAVAILABLE,
    errors.GroupNotFormedError: grpc.StatusCode.UNAVAILABLE,
    errors.LoadCancelledError: grpc.StatusCode.CANCELLED,
    errors.LoadFailedError: grpc.StatusCode.INTERNAL,
    errors.LoadError: grpc.StatusCode.INVALID_ARGUMENT,
}

log = logging.getLogger(__name__)


def status_code(error: BaseException) -> grpc.StatusCode | None:
    """Return the status of the error's nearest ancestor in the table, or `None`."""
    known = (STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)
    return next(known, None)


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call that raises with the status of its error, and the error's text."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Surround the handler with the translation."""
        handler = await continuation(handler_call_details)
        return handler and surround(handler, _translate)


@asynccontextmanager
async def _translate(request: object, context: Context) -> AsyncIterator[None]:
    # This frame lives as long as its error.
    del request
    try:
        yield
    except grpc.aio.InternalError:
        # A message could not be sent: the peer is gone, and gRPC has not reported it yet.
        raise asyncio.CancelledError from None
    except grpc.aio.BaseError:
        raise  # gRPC's own: the call is already aborted
    except Exception as error:  # noqa: BLE001 (the edge: an error not in the table is a bug)
        code = status_code(error)
        if code is None:
            # A bug. The message may quote the request: neither the log nor the caller gets it.
            place = "".join(format_tb(error.__traceback__))
            log.error("unexpected %s while answering a call\n%s", type(error).__name__, place)
            await abort(context, grpc.StatusCode.INTERNAL, "internal error; see the backend's log")
        _release(error)
        await abort(context, code, str(error))


def _release(error: BaseException) -> None:
    """Release the objects of the failed calls, images among them.

    gRPC's own error, which references this one, is in a cycle (grpcio 1.85): the collector may
    take long.
    """
    failed: BaseException | None = error
    while failed is not None:
        clear_frames(failed.__traceback__)
        failed = failed.__context__


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
    """Answers `Health` from its start, and every other call when it has services.

    Built and used on a running event loop.
    """

    def __init__(
        self, config: ServerConfig, tracing: Sequence[grpc.aio.ServerInterceptor] = ()
    ) -> None:
        self._address = config.address
        self._services: Services | None = None
        self._late_services = LateServices(_methods() - {HEALTH_METHOD})
        names = [service.full_name for service in SERVICES]
        self._health = Health(names)
        self._server = grpc.aio.server(
            interceptors=self._interceptors(config.auth_token, tracing), options=CHANNEL_OPTIONS
        )
        self._health.add_to(self._server)
        every_name = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(every_name, self._server)
        self._server.add_generic_rpc_handlers((self._late_services,))

    async def start(self) -> str:
        """Listen, and return the address, with a free port in place of 0.

        Raises:
            AddressError: The address is malformed, not ours, or taken.
        """
        bound = self._bind()
        await self._server.start()
        await self._health.report()
        return bound

    def serve(self, services: "Services") -> None:
        """Answer all calls from now on, those that are waiting already included."""
        self._services = services
        self._health.follow(services.engine)
        services.add_to(self._late_services)

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
        await self._health.end()
        if self._services is not None:
            await self._services.close()
        await self._server.stop(FLUSH_TIMEOUT_S)

    def _interceptors(
        self, auth_token: str, tracing: Sequence[grpc.aio.ServerInterceptor]
    ) -> list[grpc.aio.ServerInterceptor]:
        """Return the interceptors, the outermost first."""
        authentication = [BearerTokenInterceptor(auth_token)] if auth_token else []
        return [
            *authentication,
            self._late_services,
            *tracing,
            StatusInterceptor(),
            DecodingInterceptor(*SERVICES),
            ModelIdentityInterceptor(self._loaded_model),
        ]

    def _loaded_model(self) -> str:
        return self._services.loaded_model if self._services is not None else ""


def _methods() -> set[str]:
    return {
        f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods
    }
