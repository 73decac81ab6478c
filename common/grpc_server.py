"""A `grpc.aio` server that no name of a method can end, and that tells when it accepts no more.

grpcio 1.84 and 1.85 read the name of an unknown method where they accept calls. If it is not UTF-8,
they accept none any more, and cancel those that run.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc

from common.rpc import abort

_UNKNOWN = "Method not found!"
# Other versions accept calls of all methods alike, and read their names later.
_TELLS_METHODS_APART = hasattr(cygrpc.AioServer, "_request_registered_call")

log = logging.getLogger(__name__)


def steady_server(
    methods: Collection[str],
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, Any]],
    deaf: asyncio.Event,
) -> grpc.aio.Server:
    """Return a server on the running event loop that answers only some methods.

    Args:
        methods: As `/package.Service/Method`; handlers are added later, in any way.
        deaf: Set when it accepts no calls any more, whatever the reason; running ones go on.
    """
    server = grpc.aio.server()
    arguments = (cygrpc.get_working_loop(), None, (), tuple(interceptors), tuple(options), None)
    acceptor = _Acceptor(*arguments)
    acceptor.deaf = deaf
    if _TELLS_METHODS_APART:
        # Without handlers: those that are added are found by name.
        acceptor.add_registered_method_handlers(dict.fromkeys(methods))
    vars(server)["_server"] = acceptor
    return server


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc] # upstream has no types
    """Accepts calls of registered methods, and refuses others before their names are read."""

    deaf: asyncio.Event

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 (gRPC's own)
        super().__init__(*arguments)
        self._refusals: set[asyncio.Task[None]] = set()

    async def _server_main_loop(self, server_started: asyncio.Future[bool]) -> None:
        # Never raises: gRPC would end the running calls, and fail to stop.
        loop = super()._server_main_loop(server_started)
        error: object = (await asyncio.gather(loop, return_exceptions=True))[0]
        # At a stop, some versions end it so.
        if error and not isinstance(error, cygrpc._RequestCallError):  # noqa: SLF001
            log.error("the server accepts no calls any more: %r", error)
        self.deaf.set()

    async def _request_call(self) -> Any:  # noqa: ANN401 (a call in gRPC's own terms)
        while True:
            call = await super()._request_call()
            if not _TELLS_METHODS_APART:
                return call
            refusal = asyncio.create_task(_refuse(call))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


async def _refuse(call: Any) -> None:  # noqa: ANN401 (a call in gRPC's own terms)
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())  # noqa: SLF001
    with suppress(grpc.aio.BaseError):
        await abort(context, grpc.StatusCode.UNIMPLEMENTED, _UNKNOWN)
