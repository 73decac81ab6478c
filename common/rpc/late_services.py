"""Services that are added while the server is running already."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

import grpc
import grpc.aio

from common.rpc.handlers import Continuation, FoundHandler, Handler


class LateServices(grpc.aio.ServerInterceptor, grpc.GenericRpcHandler):
    """Holds calls of some methods until all services have been added.

    It is both an interceptor and the last generic handler of the server. The generated `add_...`
    functions take it in place of the server, which accepts services only before its start.
    """

    def __init__(self, methods: Collection[str]) -> None:
        """Create it without services.

        Args:
            methods: Those that will be added, as `/package.Service/Method`.
        """
        self._methods = methods
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._complete = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the handlers of a service."""
        self._handlers += handlers

    def add_registered_method_handlers(self, _name: str, _handlers: Mapping[str, Handler]) -> None:
        """Do nothing: the same handlers are added as generic ones."""

    def complete(self) -> None:
        """Let the held calls go on: all services have been added."""
        self._complete.set()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Pass a call on as soon as its method has been added."""
        if handler_call_details.method in self._methods:
            await self._complete.wait()
        return await continuation(handler_call_details)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> FoundHandler:
        """Return the handler of a method of the added services, or `None`."""
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)
