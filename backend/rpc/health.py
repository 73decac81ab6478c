"""Both health services, the host's and the standard one: they answer before any engine exists."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from backend.errors import EngineDownError
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from common.rpc import Context

log = logging.getLogger(__name__)

# A server that listens on all addresses is called on loopback.
_OWN = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing is bound here


async def load(address: str, model: str, token: str) -> bool:
    """Load a model, and tell whether it can be served now.

    Args:
        address: Where this process listens.
        model: A path, a hub id or `demo`.
        token: The server's own bearer token; empty for none.
    """
    target = own_address(address)
    log.info("loading %s", model)
    try:
        message = await _ask(target, model, token)
    except grpc.aio.AioRpcError as error:
        log.critical("--model %s: %s", model, error.details())
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
    """Return where this process reaches an address that it listens on."""
    host, colon, port = address.rpartition(":")
    return f"{_OWN.get(host, host)}{colon}{port}"


HEALTH_METHOD = "/backend.Backend/Health"


class FallibleEngine(Protocol):
    """An engine that may fail for good, and recover by another load."""

    @property
    def fault(self) -> str:
        """The reason why the engine can serve no more requests; empty while it can."""

    def on_fault(self, listener: Callable[[], None]) -> None:
        """Call one listener, on the event loop, whenever `fault` changes."""


class Health:
    """Reports that the server is well, unless its engine has failed."""

    def __init__(self, services: Sequence[str]) -> None:
        """Create it without an engine.

        Args:
            services: The names under which the standard service reports, besides the empty one.
        """
        self._names = (health.OVERALL_HEALTH, *services)
        self._standard = health.aio.HealthServicer()
        self._engine: FallibleEngine | None = None
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

    def follow(self, engine: FallibleEngine) -> None:
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
