"""The clients of the soak: they stay, leave, hang up, run out of time, or send nonsense."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

import grpc
import grpc.aio

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from benchmarks.soak.host import Replacements
from benchmarks.soak.soak_requests import Ask, malformed

PATIENCE_S = 120.0
# Sums of floats depend on the other rows of the batch.
TOLERANCE = 1e-3
# Hosts open a connection for each call.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)

Behaviour: TypeAlias = Callable[[grpc.aio.Channel], Awaitable[str]]

_LEFT = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
_REPLACED = {grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION}
_REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call, as far as its request determines it.

    Attributes:
        text: The text by channel; for an abandoned stream, its beginning.
        numbers: Embeddings or scores.
    """

    text: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()

    def matches(self, other: "Answer") -> bool:
        """Tell whether two are the same."""
        return self.text == other.text and all(
            math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            for a, b in zip(self.numbers, other.numbers, strict=True)
        )

    def begins(self, whole: "Answer") -> bool:
        """Tell whether this is the beginning of another."""
        pairs = zip(self.text, whole.text, strict=True)
        return all(long.startswith(short) for short, long in pairs)


@dataclass(slots=True)
class Tally:
    """The events of a soak, and its failures.

    Attributes:
        ends: How calls ended, by the client's behaviour and the status.
        faults: Descriptions of failures.
    """

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, behaviour: str, end: str) -> None:
        """Count the end of a call."""
        self.ends[f"{behaviour}: {end}"] += 1


async def answer(
    stub: backend_pb2_grpc.BackendStub, ask: Ask, timeout_s: float | None = None
) -> Answer:
    """Make a call and return its result."""
    call = getattr(stub, ask.method)(ask.request, timeout=timeout_s)
    match ask.method:
        case "PredictStream":
            return _spoken([reply async for reply in call])
        case "Embedding":
            return Answer(numbers=tuple((await call).embeddings))
        case "Score":
            return Answer(numbers=tuple(each.log_prob for each in (await call).candidates))
        case _:
            return _spoken([await call])


class Client:
    """One client; its random choices are the same for the same seed."""

    def __init__(
        self,
        address: str,
        references: Mapping[Ask, Answer],
        tally: Tally,
        replacements: Replacements,
        seed: int,
    ) -> None:
        self._address = address
        self._references = references
        self._asks = tuple(references)
        self._tally = tally
        self._replacements = replacements
        self._rng = Random(seed)

    async def run_until(self, deadline: float) -> None:
        """Behave in one way after another."""
        behaviours = (self._stay, self._leave, self._hang_up, self._run_out, self._babble)
        while time.monotonic() < deadline:
            (behave,) = self._rng.choices(behaviours, weights=(12, 3, 2, 2, 3))
            name = behave.__name__.strip("_").replace("_", " ")
            self._tally.note(name, await self._end_of(name, behave))

    async def _end_of(self, name: str, behave: Behaviour) -> str:
        replacements = self._replacements.number
        try:
            async with self._channel() as channel:
                return await behave(channel)
        except grpc.aio.AioRpcError as error:
            if not error.details():
                self._fault(name, f"{error.code().name} without a message")
            if error.code() in _REPLACED and self._replacements.overlap(replacements):
                await self._replacements.wait()
                return "the model was replaced"
            if error.code() not in _LEFT:
                self._fault(name, f"{error.code().name}: {error.details()}")
            return error.code().name

    async def _stay(self, channel: grpc.aio.Channel) -> str:
        ask = self._rng.choice(self._asks)
        self._compare(ask, await answer(_stub(channel), ask, timeout_s=PATIENCE_S))
        return "OK"

    async def _run_out(self, channel: grpc.aio.Channel) -> str:
        ask = self._rng.choice(self._asks)
        timeout_s = self._rng.uniform(0.001, 0.5)
        self._compare(ask, await answer(_stub(channel), ask, timeout_s))
        return "OK"

    async def _leave(self, channel: grpc.aio.Channel) -> str:
        ask = self._rng.choice(self._asks)
        call = asyncio.create_task(answer(_stub(channel), ask))
        await asyncio.wait([call], timeout=self._rng.uniform(0.0, 0.5))
        if not call.cancel():
            self._compare(ask, await call)
            return "OK"
        await asyncio.wait([call])
        return "CANCELLED"

    async def _hang_up(self, channel: grpc.aio.Channel) -> str:
        """Close the connection during a stream; the received part must be its beginning."""
        streams = [ask for ask in self._asks if ask.method == "PredictStream"]
        ask = self._rng.choice(streams)
        call = _stub(channel).PredictStream(ask.request)
        replies: list[pb.Reply] = []
        for _ in range(self._rng.randint(0, 5)):
            reply = await call.read()
            if reply is grpc.aio.EOF:
                break
            replies.append(reply)
        await channel.close()
        if not _spoken(replies).begins(self._references[ask]):
            self._fault("hang up", f"another reply's beginning: {ask.shape}")
        return "closed"

    async def _babble(self, channel: grpc.aio.Channel) -> str:
        method, data = self._rng.choice(malformed())
        try:
            await channel.unary_unary(f"/backend.Backend/{method}")(data)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSED or not error.details():
                raise
            return error.code().name
        self._fault("babble", f"{method} took {data[:40]!r}")
        return "OK"

    def _compare(self, ask: Ask, given: Answer) -> None:
        expected = self._references[ask]
        if not given.matches(expected):
            self._fault(ask.shape, f"{given} in place of {expected}")

    def _fault(self, subject: str, problem: str) -> None:
        self._tally.faults.append(f"{subject}: {problem[:400]}")

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)


def _stub(channel: grpc.aio.Channel) -> backend_pb2_grpc.BackendStub:
    return backend_pb2_grpc.BackendStub(channel)


def _spoken(replies: Sequence[pb.Reply]) -> Answer:
    deltas = [delta for reply in replies for delta in reply.chat_deltas]
    calls = [call for delta in deltas for call in delta.tool_calls]
    logprobs = [json.loads(reply.logprobs) for reply in replies if reply.logprobs]
    return Answer(
        text=(
            "".join(reply.message.decode() for reply in replies),
            "".join(delta.content for delta in deltas),
            "".join(delta.reasoning_content for delta in deltas),
            "".join(call.name for call in calls),
            "".join(call.arguments for call in calls),
            "".join(entry["token"] for body in logprobs for entry in body["content"]),
        )
    )
