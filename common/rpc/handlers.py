"""Wraps the handlers of a grpc.aio service from an interceptor."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from common.rpc.caller import enter_call

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
FoundHandler: TypeAlias = "Handler | None"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]]
Around: TypeAlias = Callable[[Any, Context], AbstractAsyncContextManager[None]]


def surround(
    handler: Handler, around: Around, deserialize: Callable[[bytes], Any] | None = None
) -> Handler:
    """Return a handler that enters `around(request, context)` for the duration of each call.

    The behaviours must be coroutine functions: a streaming one sends through `context.write`,
    so that its cancellation and its cleanup happen inside `around`. Handlers that receive
    a stream have no single request, and are returned unchanged. A given `deserialize` replaces
    the handler's own.
    """
    if handler.request_streaming:
        return handler
    behaviour: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def surrounded(request: object, context: Context) -> object:
        enter_call(context.peer())
        try:
            async with around(request, context):
                return await behaviour(request, context)
        finally:
            # An error raised here may live long, and keeps this frame alive.
            del request

    make_handler = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make_handler(
        surrounded, deserialize or handler.request_deserializer, handler.response_serializer
    )
