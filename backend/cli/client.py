"""A thin client of a backend: requests go out, a streamed reply comes in as increments.

It is asynchronous although one user needs no concurrency: asyncio turns Ctrl-C into a clean
cancellation, whereas a KeyboardInterrupt inside gRPC's synchronous client can leave a lock taken.

A call that fails raises `CallError`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import click
import grpc
import grpc.aio
from google.protobuf.message import Message

from backend.cli.render import printable
from backend.config import MESSAGE_LIMIT_BYTES, ServerConfig
from backend.core.step import ContentDelta, Delta, Increment, ReasoningDelta, ToolCallDelta, Usage
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from common.address import AddressError, completed, grpc_target
from common.rpc import fits_header

DEFAULT_ADDRESS = ServerConfig().address

Command = TypeVar("Command", bound=Callable[..., Any])
Found = TypeVar("Found")


class AddressType(click.ParamType[str]):
    """`HOST:PORT`, `HOST` with our port, `unix:PATH`; anything else is explained."""

    name = "address"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the whole address."""
        try:
            return completed(value)
        except AddressError as error:
            self.fail(f"{value!r}: {error.problem}", param, ctx)


def address_option_with_help(help_text: str | None = None) -> Callable[[Command], Command]:
    """Return the option `--addr`, the parameter `address` of the command."""
    return click.option(
        "--addr",
        "address",
        type=AddressType(),
        default=DEFAULT_ADDRESS,
        show_default=True,
        metavar="HOST[:PORT]|unix:PATH",
        help=help_text,
    )


address_option = address_option_with_help()


def _token(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Return a token that a header can have."""
    if not fits_header(value):
        raise click.BadParameter("only printable ASCII characters can be sent")
    return value


token_option = click.option(
    "--token",
    default="",
    callback=_token,
    envvar="LOCALAI_GRPC_AUTH_TOKEN",
    help="Bearer token of the backend.  [env: LOCALAI_GRPC_AUTH_TOKEN]",
)


ANSWER_TIMEOUT_S = 10.0
HEALTHY = b"OK"

START_HINT = "start one: mlx-grpc-backend serve"

_EXPLANATIONS = {
    grpc.StatusCode.UNAVAILABLE: f"no backend answers there; {START_HINT}",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it does not answer",
    grpc.StatusCode.UNAUTHENTICATED: "the token is missing or wrong, see --token",
}

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    # Backends are local or on the same network: use no proxy.
    ("grpc.enable_http_proxy", 0),
    # A backend that starts again is found at once.
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class CallError(Exception):
    """A call failed; the message is one line: `INVALID_ARGUMENT: Temperature: must be ...`.

    Attributes:
        code: The status, or `None` if the reply itself reported the failure.
    """

    def __init__(self, message: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code


def explained(error: CallError, way_out: str = "") -> str:
    """Return an error in one line, in plain words if possible.

    Args:
        way_out: Another thing to do if there is no backend.
    """
    explanation = _EXPLANATIONS.get(error.code) if error.code else None
    if way_out and error.code is grpc.StatusCode.UNAVAILABLE:
        explanation = f"{explanation}, or {way_out}"
    return f"{explanation} ({error})" if explanation else str(error)


def asked(address: str, token: str, work: Callable[["BackendClient"], Awaitable[Found]]) -> Found:
    """Return the result of some work with a client, on an event loop of its own.

    Raises:
        click.ClickException: A call failed.
    """

    async def found() -> Found:
        async with BackendClient(address, token) as client:
            return await work(client)

    try:
        return asyncio.run(found())
    except CallError as error:
        raise click.ClickException(printable(f"{address}: {explained(error)}")) from None


class BackendClient:
    """One channel to a backend; created and used on a running event loop."""

    def __init__(self, address: str, token: str = "") -> None:
        self._channel = grpc.aio.insecure_channel(grpc_target(address), options=CHANNEL_OPTIONS)
        self._stub = backend_pb2_grpc.BackendStub(self._channel)
        self._inspector = backend_pb2_grpc.InspectorStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; its running calls are cancelled."""
        await self._channel.close()

    async def check_health(self) -> None:
        """Return if the backend is reachable and healthy."""
        reply: pb.Reply = await self._ask(self._stub.Health, pb.HealthMessage())
        if reply.message != HEALTHY:
            raise CallError(f"Health answered {reply.message!r}")

    async def load_model(self, options: pb.ModelOptions) -> None:
        """Load a model, without a timeout."""
        with _translated_errors():
            result: pb.Result = await self._stub.LoadModel(options, metadata=self._metadata)
        if not result.success:
            raise CallError(f"LoadModel: {' '.join(result.message.split())}")

    async def has_model(self) -> bool:
        """Tell whether a model is loaded."""
        status: pb.StatusResponse = await self._ask(self._stub.Status, pb.HealthMessage())
        return status.state != pb.StatusResponse.UNINITIALIZED

    async def inspect(self) -> pb.InspectReply:
        """Return a snapshot of the engine."""
        reply: pb.InspectReply = await self._ask(self._inspector.Inspect, pb.InspectRequest())
        return reply

    async def prompt_cache(
        self, request: pb.InspectPromptCacheRequest
    ) -> pb.InspectPromptCacheReply:
        """Return the nodes of the prompt cache."""
        ask = self._inspector.InspectPromptCache
        reply: pb.InspectPromptCacheReply = await self._ask(ask, request)
        return reply

    async def counters(self) -> pb.InspectReply:
        """Return the part of a snapshot that any backend of the host's contract can give."""
        status: pb.StatusResponse = await self._ask(self._stub.Status, pb.HealthMessage())
        metrics: pb.MetricsResponse = await self._ask(self._stub.GetMetrics, pb.MetricsRequest())
        return pb.InspectReply(
            state=status.state,
            memory=status.memory,
            prompt_tokens=metrics.prompt_tokens_processed,
            generated_tokens=metrics.tokens_generated,
            tokens_per_s=metrics.tokens_per_second,
        )

    async def stream(self, request: pb.PredictOptions) -> AsyncGenerator[Increment, None]:
        """Yield a reply as it arrives; closing the generator cancels the call."""
        call = self._stub.PredictStream(request, metadata=self._metadata)
        try:
            with _translated_errors():
                async for reply in call:
                    yield _increment(reply)
        finally:
            call.cancel()

    async def _ask(self, method: Callable[..., Awaitable[Any]], request: Message) -> Any:  # noqa: ANN401 - as the stubs
        """Make a call that should be answered at once."""
        with _translated_errors():
            return await method(request, metadata=self._metadata, timeout=ANSWER_TIMEOUT_S)


def _increment(reply: pb.Reply) -> Increment:
    deltas = tuple(delta for chat in reply.chat_deltas for delta in _deltas(chat))
    if reply.message and not deltas:
        # A backend without a parser sends its text only here.
        deltas = (ContentDelta(reply.message.decode(errors="replace")),)
    usage = Usage(
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.tokens,
        prefill_ms=reply.timing_prompt_processing,
        decode_ms=reply.timing_token_generation,
    )
    return Increment(deltas, usage)


def _deltas(chat: pb.ChatDelta) -> Iterator[Delta]:
    if chat.reasoning_content:
        yield ReasoningDelta(chat.reasoning_content)
    if chat.content:
        yield ContentDelta(chat.content)
    for call in chat.tool_calls:
        yield ToolCallDelta(call.index, call.id, call.name, call.arguments)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        details = " ".join((error.details() or "no details").split())
        raise CallError(f"{error.code().name}: {details}", error.code()) from None
