"""Parts of a gRPC server: callers, authentication, model identity, late services."""

import asyncio
import hmac
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from common.log import shortened

_peer: ContextVar[str] = ContextVar("peer", default="")
_request_bytes: ContextVar[int] = ContextVar("request_bytes", default=0)
_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


class AbandonedError(Exception):
    """The caller of this work has gone; no one receives this error."""


def present_peer() -> str:
    """Return the caller's address, empty if there is none."""
    return _peer.get()


def enter_call(peer: str) -> None:
    """Record whose call the current task answers."""
    _peer.set(peer)


def present_request_bytes() -> int:
    """Return the size of the caller's request on the wire, 0 if there is none."""
    return _request_bytes.get()


def enter_request(size_bytes: int) -> None:
    """Record the size of the request that the current task answers."""
    _request_bytes.set(size_bytes)


def enter_work(abandoned: threading.Event) -> None:
    """Record the event that is set when the caller of the current work has gone."""
    _abandoned.set(abandoned)


def require_caller() -> None:
    """Stop the current work if its caller has gone.

    Raises:
        AbandonedError: The caller was cancelled.
    """
    abandoned = _abandoned.get()
    if abandoned is not None and abandoned.is_set():
        raise AbandonedError


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
FoundHandler: TypeAlias = "Handler | None"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]]
Receive: TypeAlias = Callable[[Context], Awaitable[object]]
Around: TypeAlias = Callable[[Any, Context], AbstractAsyncContextManager[Any]]


def surround(
    handler: Handler, around: Around, deserialize: Callable[[bytes], Any] | None = None
) -> Handler:
    """Return a handler that enters `around(request, context)` for the duration of each call.

    It yields the request to go on with. Behaviours with a single request must be coroutine
    functions: a streaming one sends through `context.write`, so that its cancellation and its
    cleanup happen inside `around`. Behaviours with a stream of requests must be asynchronous
    generators; `around` gets an iterator in place of the request. A given `deserialize` replaces
    the handler's own. A response may be given as bytes, by a behaviour that has serialised it.
    """
    make_handler, behaviour, surrounded = _shape(handler)
    if isinstance(behaviour, partial) and behaviour.func is surrounded:
        # One frame for all interceptors: it is resumed for each message of a stream.
        inner, behaviour = behaviour.args
        around = partial(_within, around, inner)
    surrounding: Handler = make_handler(
        partial(surrounded, around, behaviour),
        deserialize or handler.request_deserializer,
        partial(_serialized, handler.response_serializer),
    )
    return surrounding


def _shape(handler: Handler) -> tuple[Any, Any, Any]:
    """Return the maker of such a handler, its behaviour, and the wrapper of the behaviour."""
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream, _stream_surrounded
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream, _surrounded
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary, _surrounded


def _serialized(serialize: Callable[[Any], bytes] | None, response: Any) -> bytes:  # noqa: ANN401 (of any method)
    return response if isinstance(response, bytes) or not serialize else serialize(response)


async def _surrounded(around: Around, behaviour: Any, request: object, context: Context) -> object:  # noqa: ANN401 (of any method)
    enter_call(context.peer())
    try:
        async with around(request, context) as request:
            return await behaviour(request, context)
    finally:
        # An error raised here may live long, and keeps this frame alive.
        del request


async def _stream_surrounded(
    around: Around,
    behaviour: Any,  # noqa: ANN401 (of any method)
    requests: AsyncIterator[Any],
    context: Context,
) -> AsyncIterator[object]:
    enter_call(context.peer())
    async with around(requests, context) as requests:
        async for response in behaviour(requests, context):
            yield response


def received(handler: Handler, receive: Receive) -> Handler:
    """Return a handler of a stream of requests, whose only one `receive(context)` returns.

    Behaviours with a stream of responses may be asynchronous generators here.
    """
    if handler.request_streaming:
        return handler
    make_handler, behaviour = (
        (grpc.stream_stream_rpc_method_handler, handler.unary_stream)
        if handler.response_streaming
        else (grpc.stream_unary_rpc_method_handler, handler.unary_unary)
    )
    answer = _generated if isasyncgenfunction(behaviour) else _answered
    receiving: Handler = make_handler(
        partial(answer, receive, behaviour),
        handler.request_deserializer,
        handler.response_serializer,
    )
    return receiving


async def _answered(
    receive: Receive,
    behaviour: Any,  # noqa: ANN401 (of any method)
    _requests: object,
    context: Context,
) -> object:
    # No variable here: the frame lives as long as the call.
    return await behaviour(await receive(context), context)


async def _generated(
    receive: Receive,
    behaviour: Any,  # noqa: ANN401 (of any method)
    _requests: object,
    context: Context,
) -> AsyncIterator[object]:
    async for response in behaviour(await receive(context), context):
        yield response


@asynccontextmanager
async def _within(
    outer: Around, inner: Around, request: object, context: Context
) -> AsyncIterator[object]:
    try:
        async with outer(request, context) as request, inner(request, context) as request:
            yield request
    finally:
        del request


async def abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """End a call with an error; a long message loses its middle, where values are quoted."""
    await context.abort(code, shortened(message))


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose metadata lacks `authorization: Bearer <token>`."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Pass a call on if its token is right; else refuse it without reading the request."""
        if self._knows(handler_call_details):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata if key == "authorization"]
        return len(given) == 1 and hmac.compare_digest(_as_bytes(given[0]), self._expected)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


WRONG_BEARER = "missing or wrong bearer token"


def fits_header(text: str) -> bool:
    """Tell whether a header can hold a text: it takes printable ASCII characters only."""
    return text.isascii() and text.isprintable()


async def _refuse(_requests: object, context: Context) -> None:
    await abort(context, grpc.StatusCode.UNAUTHENTICATED, WRONG_BEARER)


IDENTITY_FIELD = "ModelIdentity"


def model_name(text: str) -> str:
    """Return the name of a model without slashes at its end: a directory is the same without."""
    return text.rstrip("/") or text


def identity_mismatch(request: object, loaded: str) -> str:
    """Return the message for a request that names another model; empty if it names none.

    The host looks for its first words, and removes the replica from its list.

    Args:
        loaded: The name of the loaded model; empty matches everything.
    """
    wanted = getattr(request, IDENTITY_FIELD, "")
    if not wanted or not loaded or model_name(wanted) == model_name(loaded):
        return ""
    return f"model identity mismatch: ModelIdentity is {wanted!r}, and {loaded!r} is loaded"


class ModelIdentityInterceptor(grpc.aio.ServerInterceptor):
    """Compares the model that a request names with the loaded one.

    Every request message with the field is checked, in any method. An empty name, in the request
    or of the loaded model, matches everything.

    Args:
        loaded_model: Returns the identity of the loaded model, empty when nothing is loaded.
    """

    def __init__(self, loaded_model: Callable[[], str]) -> None:
        self._loaded_model = loaded_model

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Wrap the handler with the comparison."""
        handler = await continuation(handler_call_details)
        return handler and surround(handler, self._compare)

    @asynccontextmanager
    async def _compare(self, request: object, context: Context) -> AsyncIterator[object]:
        if problem := identity_mismatch(request, self._loaded_model()):
            await abort(context, grpc.StatusCode.NOT_FOUND, problem)
        yield request


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
