"""A real server on a real socket around a real engine, for tests that go the whole way."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from scripted_engine import server_of
from waiting import until

from backend.cli.client import BackendClient
from backend.config import MESSAGE_LIMIT_BYTES
from backend.engine.engine import Engine
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.pipeline.served_model import ServedModel

Stub = backend_pb2_grpc.BackendStub
# Fields of a request that is still running whenever a test looks: drafts would soon fill a context.
UNENDING: dict[str, Any] = {"Tokens": 0, "Metadata": {"speculation": "off"}}
LIMITS = [
    ("grpc.max_send_message_length", 2 * MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", 2 * MESSAGE_LIMIT_BYTES),
]


@dataclass
class Served:
    """A running server, its engine, and a way in."""

    channel: grpc.aio.Channel
    engine: Engine
    address: str

    @property
    def stub(self) -> Any:
        return Stub(self.channel)

    @property
    def is_idle(self) -> bool:
        """Whether the engine holds no request, waiting or running."""
        status = self.engine.status()
        return not (status.metrics["slots_taken"] or status.metrics["waiting"])

    @asynccontextmanager
    async def held(self, count: int) -> AsyncIterator[None]:
        """Stop the engine until so many requests are sent: it gets them all at once."""
        process_id = self.engine.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        try:
            yield
            await until(lambda: len(self.engine.calls.requests) == count)
        finally:
            os.kill(process_id, signal.SIGCONT)

    async def load(self, directory: Path | str, **options: Any) -> pb.Result:
        return await self.stub.LoadModel(pb.ModelOptions(Model=str(directory), **options))


@asynccontextmanager
async def served(
    model: Path | None = None,
    *,
    auth_token: str = "",
    memory_ledger: Path | None = None,
    findings: Path | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve, with a model loaded if one is given; everything is gone afterwards."""
    engine = Engine(serve=ServedModel.of, memory_ledger=memory_ledger, findings=findings)
    server = server_of(engine, auth_token=auth_token)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=LIMITS) as channel:
            running = Served(channel, engine, address)
            if model is not None and auth_token:
                async with BackendClient(address, auth_token) as client:
                    await client.load_model(pb.ModelOptions(Model=str(model), **options))
            elif model is not None:
                assert (await running.load(model, **options)).success
            yield running
    finally:
        await engine.close(drain_timeout_s=0.0)
        await server.stop()


class SharedServers:
    """Servers that stay for the tests to come; one in which a test failed does not."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[Served, AsyncExitStack]] = {}

    async def __aenter__(self) -> "SharedServers":
        return self

    async def __aexit__(self, *_: object) -> None:
        for _, cleanup in self._running.values():
            await cleanup.aclose()

    @asynccontextmanager
    async def __call__(self, model: Path | None = None, **options: Any) -> AsyncIterator[Served]:
        """Do as `served` does, but leave the server running, idle."""
        key = str(model), repr(sorted(options.items()))
        if key not in self._running:
            cleanup = AsyncExitStack()
            self._running[key] = (
                await cleanup.enter_async_context(served(model, **options)),
                cleanup,
            )
        running, cleanup = self._running[key]
        try:
            yield running
            await until(lambda: running.is_idle)
        except BaseException:
            del self._running[key]
            await cleanup.aclose()
            raise


@dataclass
class Reply:
    """A folded stream, as a client sees it, and the replies it was folded from."""

    replies: list[pb.Reply] = field(default_factory=list)
    message: str = ""
    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def last(self) -> pb.Reply:
        return self.replies[-1]

    @property
    def said(self) -> tuple[Any, ...]:
        """All that does not depend on how it came: texts, calls without ids, how many tokens."""
        calls = [(call["name"], call["arguments"]) for call in self.calls.values()]
        listed = [one.logprobs for one in self.replies if one.logprobs]
        return (self.message, self.content, self.reasoning, calls, len(listed), self.last.tokens)

    def add(self, reply: pb.Reply) -> None:
        self.replies.append(reply)
        self.message += reply.message.decode()
        for delta in reply.chat_deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning_content
            for piece in delta.tool_calls:
                call = self.calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                call["id"] = piece.id or call["id"]
                call["name"] = piece.name or call["name"]
                call["arguments"] += piece.arguments


async def stream(stub: Any, request: pb.PredictOptions) -> Reply:
    """Take a whole stream and fold it as the host does."""
    folded = Reply()
    async for reply in stub.PredictStream(request):
        folded.add(reply)
    return folded


def chat(messages: Sequence[dict[str, str]], *, tools: Sequence[Any] = (), **options: Any) -> Any:
    """Build a request for the chat template."""
    return pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[pb.Message(**message) for message in messages],
        Tools=json.dumps(list(tools)) if tools else "",
        **options,
    )


def user(text: str) -> dict[str, str]:
    """Build a user message."""
    return {"role": "user", "content": text}


def spoken(**options: Any) -> pb.PredictOptions:
    """Build a request for 40 tokens of a tiny model."""
    return pb.PredictOptions(Prompt="ba be bi", Tokens=40, IgnoreEOS=True, **options)


SPOKEN = (
    spoken(),
    spoken(Temperature=0.8, Seed=4),
    spoken(Temperature=1.0, TopP=0.9, Penalty=1.2, Seed=5, NDraft=4),
    spoken(Grammar='root ::= ("ba" | "be"){20}'),
)


def undrafted(request: pb.PredictOptions) -> pb.PredictOptions:
    """Return a request that is answered without drafts."""
    copy = pb.PredictOptions()
    copy.CopyFrom(request)
    copy.Metadata["speculation"] = "off"
    return copy


async def inspect(backend: Served) -> pb.InspectReply:
    """Ask a backend about itself."""
    return await backend_pb2_grpc.InspectorStub(backend.channel).Inspect(pb.InspectRequest())


# A source of drafts that lost time while the machine was busy earns some back in each.
_MOST_REPLIES = 60


async def until_accepted(backend: Served, request: pb.PredictOptions) -> pb.InspectReply:
    """Take replies until a draft was right: on a busy machine none may be tried at first."""
    for _ in range(_MOST_REPLIES):
        if (report := await inspect(backend)).accepted_tokens:
            return report
        await stream(backend.stub, request)
    raise AssertionError(f"no draft was accepted in {_MOST_REPLIES} replies")


async def require_same(backend: Served, requests: Sequence[pb.PredictOptions]) -> list[Reply]:
    """Compare replies to requests alone without drafts with those to all at once with drafts."""
    drafted = (await inspect(backend)).drafted_tokens
    plain = [await stream(backend.stub, undrafted(request)) for request in requests]
    assert (await inspect(backend)).drafted_tokens == drafted
    found = await asyncio.gather(*(stream(backend.stub, request) for request in requests))
    assert [reply.said for reply in found] == [reply.said for reply in plain]
    return found


def tokens_read(backend: Served) -> int:
    """Return how many tokens the engine of an encoder has read."""
    return int(backend.engine.status().metrics["prompt_tokens"])


async def read_for(backend: Served, call: Awaitable[Any]) -> int:
    """Await a call, and return how many tokens were read meanwhile."""
    before = tokens_read(backend)
    await call
    return tokens_read(backend) - before


async def require_others_pass_and_leaving_ends(
    backend: Served, short: Callable[[], Awaitable[Any]], long: Callable[[], Awaitable[Any]]
) -> None:
    """Check that a call is answered while a long text is read, which ends when its caller leaves.

    Args:
        short: Makes a call, always the same.
        long: Makes a call of many parts.
    """
    tokens, start = await read_for(backend, short()), tokens_read(backend)
    work = asyncio.ensure_future(long())
    await until(lambda: tokens_read(backend) > start)
    await short()
    assert not work.done()
    work.cancel()
    # A part may be at work, or on its way.
    assert [await read_for(backend, short()) for _ in range(4)][-1] == tokens


async def goes_on_after_a_loss(backend: Served, request: pb.PredictOptions) -> Reply:
    """Kill the engine at the first piece of a stream; return the rest of it with it."""
    restarts, folded = backend.engine.status().metrics["restarts"], Reply()
    async for reply in backend.stub.PredictStream(request):
        if not folded.replies:
            process_id = backend.engine.process_id
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)
        folded.add(reply)
    # On a busy machine the reply may have been on its way as a whole.
    await until(lambda: backend.engine.status().metrics["restarts"] == restarts + 1)
    return folded


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Await a call that must fail and return its status and details."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call succeeded")


class Stderr:
    """All that this process and its engines have written to stderr."""

    def __init__(self, capfd: Any) -> None:
        self._capfd = capfd
        self._text = ""

    @property
    def text(self) -> str:
        self._text += self._capfd.readouterr().err
        return self._text

    async def holds(self, words: str) -> None:
        """Wait for words: a thread of the process that has them writes them."""
        await until(lambda: words in self.text)


@asynccontextmanager
async def handled(
    service: str, handlers: dict[str, Any], interceptor: grpc.aio.ServerInterceptor
) -> AsyncIterator[grpc.aio.Channel]:
    """Yield a channel to a server with these handlers, after one interceptor."""
    server = grpc.aio.server(interceptors=[interceptor])
    handler = grpc.method_handlers_generic_handler(service, handlers)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)
