"""A scripted backend on a real socket, in a thread of its own: the client keeps the main one."""
# ruff: noqa: N802 - the methods have the names of the RPCs

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO
from typing import Any

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from backend.cli.app import main
from backend.cli.client import BackendClient
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

TIMEOUT_S = 30.0
NUDGE_S = 0.05


class Act(Enum):
    """The acts of a script besides sending replies."""

    PRESS_CTRL_C = "Ctrl-C at the client, then silence"
    HANG = "silence"


@dataclass(frozen=True)
class Refuse:
    code: grpc.StatusCode
    details: str


Script = Sequence[pb.Reply | Refuse | Act]


@dataclass
class ScriptedBackend(backend_pb2_grpc.BackendServicer, backend_pb2_grpc.InspectorServicer):
    """Plays a script per PredictStream, a report per Inspect, and remembers requests and loads.

    Without any reports it does not know Inspect.
    """

    scripts: list[Script] = field(default_factory=list)
    reports: list[pb.InspectReply | Refuse | Act] | None = None
    requests: list[pb.PredictOptions] = field(default_factory=list)
    loads: list[pb.ModelOptions] = field(default_factory=list)
    load_result: pb.Result = field(default_factory=lambda: pb.Result(success=True))
    state: int = pb.StatusResponse.READY
    token: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    async def Health(self, _request: Any, context: Any) -> pb.Reply:
        await self._check_token(context)
        return pb.Reply(message=b"OK")

    async def Status(self, _request: Any, _context: Any) -> pb.StatusResponse:
        memory = pb.MemoryUsageData(total=2000, breakdown={"weights": 1000})
        return pb.StatusResponse(state=self.state, memory=memory)

    async def GetMetrics(self, _request: Any, _context: Any) -> pb.MetricsResponse:
        return pb.MetricsResponse(
            tokens_per_second=1.5, tokens_generated=13, prompt_tokens_processed=11
        )

    async def Inspect(self, _request: Any, context: Any) -> pb.InspectReply:
        await self._check_token(context)
        if self.reports is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        step = self.reports.pop(0)
        if isinstance(step, pb.InspectReply):
            return step
        return await self._play(step, context)

    async def LoadModel(self, request: pb.ModelOptions, _context: Any) -> pb.Result:
        self.loads.append(request)
        return self.load_result

    async def PredictStream(self, request: pb.PredictOptions, context: Any) -> None:
        self.requests.append(request)
        try:
            for step in self.scripts.pop(0):
                await self._play(step, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _check_token(self, context: Any) -> None:
        given = list(context.invocation_metadata())
        if self.token and ("authorization", f"Bearer {self.token}") not in given:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")

    async def _play(self, step: pb.Reply | Refuse | Act, context: Any) -> None:
        match step:
            case Refuse(code, details):
                await context.abort(code, details)
            case Act():
                if step is Act.PRESS_CTRL_C:
                    await _press_ctrl_c()
                await asyncio.Event().wait()
            case _:
                await context.write(step)


async def _press_ctrl_c() -> None:
    """Interrupt the main thread, and wake it until it leaves.

    A signal that comes between Python's last look at its signals and the system call that
    waits is noticed when that call returns, and nothing else may end it.
    """
    main_thread = threading.main_thread().ident
    signal.pthread_kill(main_thread, signal.SIGINT)
    while True:
        await asyncio.sleep(NUDGE_S)
        signal.pthread_kill(main_thread, signal.SIGURG)


def thought(text: str) -> pb.Reply:
    return pb.Reply(chat_deltas=[pb.ChatDelta(reasoning_content=text)])


def content(text: str, tokens: int = 1) -> pb.Reply:
    return pb.Reply(
        message=text.encode(),
        chat_deltas=[pb.ChatDelta(content=text)],
        tokens=tokens,
        prompt_tokens=30,
        timing_token_generation=500.0,
    )


def call_piece(index: int = 0, **parts: str) -> pb.Reply:
    return pb.Reply(chat_deltas=[pb.ChatDelta(tool_calls=[pb.ToolCallDelta(index=index, **parts)])])


def weather_call(city: str, index: int = 0) -> list[pb.Reply]:
    return [
        call_piece(index, id=f"call_{index}", name="get_weather"),
        call_piece(index, arguments='{"city": '),
        call_piece(index, arguments=f'"{city}"}}'),
    ]


def report(*requests: pb.RequestReport) -> pb.InspectReply:
    return pb.InspectReply(
        state=pb.StatusResponse.BUSY,
        model=pb.ModelReport(
            name="org/tiny", type="llama", path="/models/tiny", context_length=4096, max_slots=16
        ),
        memory=pb.MemoryUsageData(
            total=3_000_000_000, breakdown={"weights": 1_500_000_000, "mlx_peak": 6_000_000_000}
        ),
        prompt_cache=pb.PromptCacheReport(
            bytes=2_000_000_000,
            budget_bytes=8_000_000_000,
            nodes=35,
            tokens=12_345,
            looked_up_tokens=1000,
            hit_tokens=630,
            hits={"miss": 1, "exact": 4},
            evictions=3,
        ),
        slots_taken=2,
        waiting=1,
        prompt_tokens=370,
        generated_tokens=5_000_000_000,
        tokens_per_s=45.2,
        requests=requests,
    )


def request(request_id: str, phase: str, **counts: Any) -> pb.RequestReport:
    return pb.RequestReport(
        request_id=request_id, phase=phase, prompt_tokens=1000, **{"hit_kind": "miss", **counts}
    )


@dataclass
class Scripts:
    """Builders of replies and steps, as tests cannot import a conftest."""

    thought = staticmethod(thought)
    content = staticmethod(content)
    call_piece = staticmethod(call_piece)
    weather_call = staticmethod(weather_call)
    report = staticmethod(report)
    request = staticmethod(request)
    refuse = Refuse
    press_ctrl_c = Act.PRESS_CTRL_C
    hang = Act.HANG


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch):
    """Let no test depend on the terminal that it is run from."""
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def script() -> Scripts:
    return Scripts()


async def _serve(backend: ScriptedBackend, ready: Future[str], stop: asyncio.Event) -> None:
    server = grpc.aio.server()
    backend_pb2_grpc.add_BackendServicer_to_server(backend, server)
    backend_pb2_grpc.add_InspectorServicer_to_server(backend, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.set_result(f"127.0.0.1:{port}")
    await stop.wait()
    await server.stop(grace=0)
    # A task that is destroyed with its loop reports it on stderr, in a later test.
    if rest := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in rest:
            task.cancel()
        await asyncio.wait(rest, timeout=TIMEOUT_S)


@pytest.fixture
def scripted() -> Iterator[ScriptedBackend]:
    backend = ScriptedBackend()
    ready: Future[str] = Future()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(backend, ready, stop)), name="scripted"
    )
    thread.start()
    backend.address = ready.result(TIMEOUT_S)
    yield backend
    loop.call_soon_threadsafe(stop.set)
    thread.join(TIMEOUT_S)
    loop.close()


@pytest.fixture
async def client(scripted: ScriptedBackend) -> AsyncIterator[BackendClient]:
    async with BackendClient(scripted.address) as client:
        yield client


@pytest.fixture
def console() -> Console:
    """A console without a terminal; its file has the printed text."""
    return Console(file=StringIO(), width=60)


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C reach this process: one that a shell put in the background is deaf to it."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    nudge = signal.signal(signal.SIGURG, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGURG, nudge)


@pytest.fixture
def run_chat(scripted: ScriptedBackend):
    """Run `chat` on typed lines, in the main thread."""

    def run(*lines: str, options: Sequence[str] = ()) -> Result:
        arguments = ["chat", "--addr", scripted.address, *options]
        return CliRunner().invoke(main, arguments, input="".join(f"{line}\n" for line in lines))

    return run


@pytest.fixture
def run_status(scripted: ScriptedBackend):
    """Run `status`, in the main thread, on a console without a terminal."""

    def run(*options: str, address: str = "") -> Result:
        arguments = ["status", "--addr", address or scripted.address, *options]
        return CliRunner(env={"COLUMNS": "100"}).invoke(main, arguments)

    return run
