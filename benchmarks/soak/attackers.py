"""The soak's attackers: their requests and acts must cost others neither replies nor time.

Each attack is one that a caller may try, and after which the server is as before.
"""

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from random import Random

import grpc
import grpc.aio

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from benchmarks.soak.clients import CHANNEL_OPTIONS, Tally

TEXT_CHARS, MESSAGES, TOOLS = 1_000_000, 10_000, 60
# An attack that takes longer has had its effect.
PATIENCE_S = 20.0
KILL_INTERVAL_S = 3.0
# Texts in which a tokenizer finds no place to cut.
WORDLESS = ("a", "\n", "🙂", "ab", "é")
# Modules of the server's children that can be lost, but for the engine.
HELPERS = ("isolated.rendering_process", "isolated.encoding", "media.decoding_process")
_ENDS = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
    # Of an attack whose helper was killed twice, by attackers too.
    grpc.StatusCode.UNAVAILABLE,
}


class Attacker:
    """One attacker; its random choices are the same for the same seed."""

    def __init__(self, address: str, empty: Path, model: Path, tally: Tally, seed: int) -> None:
        """Prepare its attacks.

        Args:
            empty: An empty directory: no model.
            model: The loaded model.
        """
        self._address = address
        self._empty = str(empty)
        self._model = str(model)
        self._tally = tally
        self._rng = Random(seed)

    async def run_until(self, end: float) -> None:
        """Attack in one way after another, beginning anywhere."""
        attacks = [self._text_without_words, self._many_messages, self._leave_early, self._bad_load]
        begin = self._rng.randrange(len(attacks))
        for attack in cycle(attacks[begin:] + attacks[:begin]):
            if time.monotonic() > end:
                return
            name = attack.__name__.strip("_").replace("_", " ")
            async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
                try:
                    await attack(backend_pb2_grpc.BackendStub(channel))
                except grpc.aio.AioRpcError as error:
                    self._tally.note(name, error.code().name)
                    if error.code() not in _ENDS or not error.details():
                        self._tally.faults.append(
                            f"{name}: {error.code().name}: {str(error.details())[:400]}"
                        )
                else:
                    self._tally.note(name, "OK")

    async def _text_without_words(self, stub: backend_pb2_grpc.BackendStub) -> None:
        text = self._rng.choice(WORDLESS) * TEXT_CHARS
        prompt = pb.PredictOptions(Prompt=text[:TEXT_CHARS], Tokens=1)
        call = self._rng.choice((stub.TokenizeString, stub.Predict, stub.Embedding))
        await call(prompt, timeout=PATIENCE_S)

    async def _many_messages(self, stub: backend_pb2_grpc.BackendStub) -> None:
        messages = [pb.Message(role="user", content="hi")] * MESSAGES
        request = pb.PredictOptions(UseTokenizerTemplate=True, Messages=messages, Tokens=1)
        await stub.Predict(request, timeout=PATIENCE_S)

    async def _leave_early(self, stub: backend_pb2_grpc.BackendStub) -> None:
        """Ask for a call of one of many tools, and leave while the request is prepared."""
        call = stub.PredictStream(self._large_request())
        await asyncio.sleep(self._rng.uniform(0.0, 0.1))
        call.cancel()

    async def _bad_load(self, stub: backend_pb2_grpc.BackendStub) -> None:
        options = self._rng.choice(
            (
                pb.ModelOptions(Model=self._empty),
                pb.ModelOptions(Model=f"{self._empty}/nowhere"),
                pb.ModelOptions(Model=self._model, LoraAdapter=self._empty),
            )
        )
        await stub.LoadModel(options, timeout=PATIENCE_S)
        self._tally.faults.append(f"bad load: {options} was loaded")

    def _large_request(self) -> pb.PredictOptions:
        word = f"{self._rng.getrandbits(40):x}"
        fields = {f"{word}_{number}": {"type": "string", "maxLength": 9} for number in range(8)}
        parameters = {"type": "object", "properties": fields, "required": list(fields)}
        tools = [
            {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}
            for number in range(TOOLS)
        ]
        return pb.PredictOptions(
            UseTokenizerTemplate=True,
            Messages=[pb.Message(role="user", content=f"{word} " * 200)],
            Tools=json.dumps(tools),
            ToolChoice="required",
            Tokens=4,
        )


async def kill_helpers(server: int, end: float, tally: Tally) -> None:
    """Kill one of the server's helper processes again and again, each kind in turn."""
    for helper in cycle(HELPERS):
        await asyncio.sleep(KILL_INTERVAL_S)
        if time.monotonic() > end:
            return
        running = (child for child in _children(server) if _runs(child, helper))
        with suppress(ProcessLookupError):
            for child in islice(running, 1):
                os.kill(child, signal.SIGKILL)
                tally.note("kill a helper", helper)


def _runs(process: int, module: str) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return module in command


def _children(server: int) -> list[int]:
    """Return the children of a process; none where the system does not list them."""
    found: list[int] = []
    for task in Path(f"/proc/{server}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text(encoding="utf-8").split())
    return found
