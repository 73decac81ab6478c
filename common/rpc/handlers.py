"""Wraps the handlers of a grpc.aio service from an interceptor."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
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

    if isinstance(behaviour, partial) and behaviour.func is _surrounded:
        # One frame for all interceptors: it is resumed for each message of a stream.
        inner, behaviour = behaviour.args
        around = partial(_within, around, inner)
    make_handler = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make_handler(
        partial(_surrounded, around, behaviour),
        deserialize or handler.request_deserializer,
        handler.response_serializer,
    )


async def _surrounded(around: Around, behaviour: Any, request: object, context: Context) -> object:  # noqa: ANN401 (of any method)
    enter_call(context.peer())
    try:
        async with around(request, context):
            return await behaviour(request, context)
    finally:
        # An error raised here may live long, and keeps this frame alive.
        del request


@asynccontextmanager
async def _within(
    outer: Around, inner: Around, request: object, context: Context
) -> AsyncIterator[None]:
    try:
        async with outer(request, context), inner(request, context):
            yield
    finally:
        del request
