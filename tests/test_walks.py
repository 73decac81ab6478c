"""The walks of `docs/internals/architecture.md`: a request and a token visit no module twice."""

import asyncio
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripted_engine import PREFILL, ScriptedEngine, served, stub

from backend.core.delta import FinishReason
from backend.core.step import Steps
from backend.pb import backend_pb2 as pb
from backend.pipeline import worker_pool

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "architecture.md"
GUIDES = {
    "backend.rpc.servicer",
    "backend.pipeline.generate",
    "backend.pipeline.prompt.rendering",
    "backend.output.reply",
}
"""Modules that lead a walk from one module to the next."""

VALUES = re.compile(r"backend\.(core|config|errors|formats|output\.format)\b")
PARSING = re.compile(r"backend\.rpc\.(parsing|host_rules)\b")
OUTSIDE = re.compile(r"backend\.(engine|rpc\.parsing|rpc\.servicer)\b")
"""Of the tables: recorded elsewhere, or the beginning of the walk."""

REQUEST = pb.PredictOptions(
    UseTokenizerTemplate=True,
    Messages=[pb.Message(role="user", content="hello")],
    StopPrompts=["no"],
)


class Recorder:
    """Writes down which modules of the backend the guides call, on any thread."""

    def __init__(self, frames):
        """Start without visits.

        Args:
            frames: Known ones by their id: a coroutine that goes on is no new call.
        """
        self.visits = []
        self._frames = frames

    def start(self):
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def stop(self):
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame, event, _argument):
        if event != "call" or id(frame) in self._frames:
            return
        # Kept, so that no other frame gets its id.
        self._frames[id(frame)] = frame
        module = module_of(frame)
        if VALUES.match(module) or not module.startswith("backend."):
            return
        caller = next((name for name in callers_of(frame) if name.startswith("backend.")), "")
        is_step = caller in GUIDES and caller != module and not PARSING.match(module)
        if is_step and self.visits[-1:] != [module]:
            self.visits.append(module)


def module_of(frame):
    return frame.f_globals.get("__name__", "")


def callers_of(frame):
    while (frame := frame.f_back) is not None:
        yield module_of(frame)


class RecordedEngine(ScriptedEngine):
    """Records the walk of its request up to here, and that of the second of three tokens."""

    def __init__(self):
        super().__init__()
        frames = {}
        self.request, self.token = Recorder(frames), Recorder(frames)

    def submit(self, model, request):
        self.request.stop()
        return super().submit(model, request)

    async def _play(self):
        yield Steps(PREFILL, [ord("a")])
        self.token.start()
        yield Steps(token_ids=[ord("b")])
        # The next step is asked for when this one has been sent.
        self.token.stop()
        yield Steps(token_ids=[ord("c")], finish_reason=FinishReason.LENGTH)


def modules_of(title):
    """Return the server's modules of a table, in its order."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| \d+ \| (?:loop|worker) \| ([^|]+) \|", section, re.MULTILINE)
    paths = [path for cell in cells for path in re.findall(r"`([\w/]+)`", cell)]
    modules = [f"backend.{path.replace('/', '.')}" for path in paths]
    return [module for module in modules if not OUTSIDE.match(module)]


@pytest.fixture(scope="module")
def engine():
    async def answer():
        engine = RecordedEngine()
        async with served(engine) as channel:
            stream = stub(channel).PredictStream(REQUEST)
            engine.request.start()
            async for _ in stream:
                pass
        return engine

    # Only threads that begin while a recorder looks on are recorded.
    with ThreadPoolExecutor(1) as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "_new_threads", lambda _name, _count: threads)
        return asyncio.run(answer())


def test_a_request_visits_the_modules_of_its_table_once_and_in_order(engine):
    assert engine.request.visits == modules_of("The walk of a request")


def test_a_token_visits_the_modules_of_its_table_once_and_in_order(engine):
    assert engine.token.visits == modules_of("The walk of a token")
