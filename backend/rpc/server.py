"""The grpc.aio server: listen at once, serve an engine, drain, stop. Imports no MLX."""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from traceback import clear_frames, format_tb
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from backend import errors
from backend.config import (
    MAX_CONNECTIONS,
    MAX_PENDING_CALLS,
    MAX_STREAMS,
    MESSAGE_LIMIT_BYTES,
    ServerConfig,
)
from backend.errors import EngineDownError
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.rpc.arrivals import ArrivalInterceptor
from backend.rpc.decoding import RECEIVE_LIMIT_BYTES, DecodingInterceptor
from common.address import (
    AddressError,
    grpc_target,
    probe_port,
    probe_socket,
    socket_path,
    split_address,
)
from common.grpc_server import steady_server
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
    from backend.pipeline.served_model import ServedEngine
    from backend.rpc.services import Services

log = logging.getLogger(__name__)

# A server that listens on all addresses is called on loopback.
_OWN = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing is bound here


async def load(address: str, model: str, token: str) -> bool:
    """Load a model, and tell whether it can be served now.

    Args:
        model: A path, a hub id or `demo`.
        token: The server's own bearer token; empty for none.
    """
    target = own_address(address)
    log.info("loading %s", model)
    try:
        message = await _ask(target, model, token)
    except grpc.aio.AioRpcError as error:
        log.critical("%s is not loaded: %s", model, error.details())
        return False
    log.info("ready: %s at %s", message, target)
    return True


async def _ask(target: str, model: str, token: str) -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with grpc.aio.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as own:
        ask = backend_pb2_grpc.BackendStub(own).LoadModel
        result: pb.Result = await ask(pb.ModelOptions(Model=model), metadata=metadata)
    return result.message


def own_address(address: str) -> str:
    """Return where gRPC of this process reaches an address that it listens on."""
    host, colon, port = grpc_target(address).rpartition(":")
    return f"{_OWN.get(host, host)}{colon}{port}"


HEALTH_METHOD = "/backend.Backend/Health"


class Health:
    """Reports that the server is well, unless its engine has failed."""

    def __init__(self, services: Sequence[str]) -> None:
        """Create it without an engine.

        Args:
            services: The names under which the standard service reports, besides the empty one.
        """
        self._names = (health.OVERALL_HEALTH, *services)
        self._standard = health.aio.HealthServicer()
        self._engine: ServedEngine | None = None
        self._news: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add both services to a server."""
        method = grpc.unary_unary_rpc_method_handler(
            self.answer, pb.HealthMessage.FromString, pb.Reply.SerializeToString
        )
        _, service, name = HEALTH_METHOD.split("/")
        handler = grpc.method_handlers_generic_handler(service, {name: method})
        server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._standard, server)

    async def answer(self, _request: pb.HealthMessage, _context: Context) -> pb.Reply:
        """Answer at once, however busy the engine is; OK unless it cannot recover."""
        if self._fault:
            raise EngineDownError(self._fault)
        return pb.Reply(message=b"OK")

    def follow(self, engine: "ServedEngine") -> None:
        """Report the state of an engine from now on."""
        self._engine = engine
        engine.on_fault(self._note_fault)

    async def report(self) -> None:
        """Have the standard service report the same as `Health`, under every name."""
        answer = health_pb2.HealthCheckResponse
        status = answer.NOT_SERVING if self._fault else answer.SERVING
        for name in self._names:
            await self._standard.set(name, status)

    async def end(self) -> None:
        """Have the standard service report that the server is stopping."""
        await self._standard.enter_graceful_shutdown()

    @property
    def _fault(self) -> str:
        return self._engine.fault if self._engine is not None else ""

    def _note_fault(self) -> None:
        self._news = asyncio.create_task(self.report())


STATUS_CODES: dict[type[errors.BackendError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    # Distributed hosts drop the replica on this status: nothing else may use it.
    errors.ModelNotLoadedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongModelError: grpc.StatusCode.NOT_FOUND,
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
    errors.DiskFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DownloadError: grpc.StatusCode.UNAVAILABLE,
    errors.GroupNotFormedError: grpc.StatusCode.UNAVAILABLE,
    errors.LoadCancelledError: grpc.StatusCode.CANCELLED,
    errors.LoadFailedError: grpc.StatusCode.INTERNAL,
    errors.LoadError: grpc.StatusCode.INVALID_ARGUMENT,
}


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
async def _translate(request: object, context: Context) -> AsyncIterator[object]:
    # This frame lives as long as its error: it keeps no request.
    passed_on = [request]
    del request
    try:
        yield passed_on.pop()
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
_STANDARD_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME)
FLUSH_TIMEOUT_S = 0.5

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", RECEIVE_LIMIT_BYTES),
    # Two servers on one port would share its calls: the second must fail.
    ("grpc.so_reuseport", 0),
    # A client whose machine has vanished sends no FIN: keepalive frees its slot after 30 s, and its
    # place among the connections.
    ("grpc.keepalive_time_ms", 10_000),
    # That of TCP too: a client that reads nothing for so long, as on a busy machine, is cut off.
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Without pings that measure bandwidth: their answers come after all that a slow client is
    # sending, and a picture that takes longer than the timeout would never arrive.
    ("grpc.http2.bdp_probe", 0),
    # gRPC ends calls of any caller while more than 1,000 wait for the event loop.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Those that a caller has reset count until they are seen on the event loop: a flood is refused.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Clients may ping during a long prefill, which sends nothing.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class BackendServer:
    """Answers `Health` from its start, and every other call when it has services.

    Built and used on a running event loop.

    Attributes:
        deaf: Set once no calls are accepted any more.
    """

    def __init__(
        self,
        config: ServerConfig,
        tracing: Sequence[grpc.aio.ServerInterceptor] = (),
        *,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Create it; it listens later.

        Args:
            max_connections: More than so many at once are closed, or than a half of the
                descriptors that the process may have.
        """
        limit = _within_descriptors(max_connections)
        self._address = config.address
        self._services: Services | None = None
        self._late_services = LateServices(_methods(*SERVICES) - {HEALTH_METHOD})
        names = [service.full_name for service in SERVICES]
        self._health = Health(names)
        self.deaf = asyncio.Event()
        self._server = steady_server(
            _methods(*SERVICES, *_standard_services()),
            self._interceptors(config.auth_token, tracing),
            (*CHANNEL_OPTIONS, ("grpc.max_allowed_incoming_connections", limit)),
            self.deaf,
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
            self._server.add_insecure_port(grpc_target(address))
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
            ArrivalInterceptor(),
            self._late_services,
            *tracing,
            StatusInterceptor(),
            DecodingInterceptor(*SERVICES, *_standard_services()),
            ModelIdentityInterceptor(self._loaded_model),
        ]

    def _loaded_model(self) -> str:
        return self._services.loaded_model if self._services is not None else ""


def _within_descriptors(connections: int) -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if allowed == resource.RLIM_INFINITY else min(connections, allowed // 2)


def _standard_services() -> Iterable[ServiceDescriptor]:
    return map(descriptor_pool.Default().FindServiceByName, _STANDARD_SERVICES)


def _methods(*services: ServiceDescriptor) -> set[str]:
    return {
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    }
