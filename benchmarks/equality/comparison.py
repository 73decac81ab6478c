"""Are replies the same with and without drafts? Tokens, log-probabilities and ends, by family.

    python -m benchmarks.equality --tokens 100000

Each request is computed alone without drafts, then with drafts among up to 16 others that join,
pause and are cancelled. The exit code is 1 if a reply differs by more than a tie.
"""

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import click
import grpc.aio

from backend.cli.server_process import ServerProcess
from backend.config import ModelOptions, TuningOptions
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from benchmarks.equality.requests import CONTEXT, requests_of
from benchmarks.harness.models import CACHE
from scripts.tiny_drafters import LAGUNA, MUSE

# For a log-probability. Beyond the first it is reported: in a few places raw mlx-lm exceeds it too,
# between prefill and decoding, and so do quantised keys in a batch. Beyond the second it is wrong.
TOLERANCE = 1e-4
LIMIT = 5e-3
MOST_ROWS = 16
CANCELLED_SHARE = 0.15
# All requests of a wave arrive before the next wave, so that the rows differ between waves.
WAVE_REQUESTS = 24
MEAN_TOKENS = 45
# Room for this many rows of a whole context, so that some must pause.
ROOM_ROWS = 3
EXPECTED_TOKENS = 32
PAUSED = "pauses"


@dataclass(frozen=True, slots=True)
class Subject:
    """A family, and its load options.

    Attributes:
        name: Its name in reports.
        family: A key of the tiny models, of the tiny vision models, or of the sweep's.
        options: Of its load.
        sees: Whether it gets images.
        draft: The family of its draft model, if it has one.
        head: A key of `HEADS`, if it has its own head, which knows its output.
    """

    name: str
    family: str
    options: tuple[str, ...] = ()
    sees: bool = False
    draft: str = ""
    head: str = ""

    @property
    def directory(self) -> Path:
        """Its directory, built or not."""
        kind = self.head or ("seeing" if self.sees else "")
        return _directory(self.family, kind)

    @property
    def drafter(self) -> Path | None:
        """The directory of its draft model or head."""
        if self.head:
            return self.directory.with_name(f"{self.family}-head")
        return _directory(self.draft) if self.draft else None


SUBJECTS = (
    *(
        Subject(family, family)
        for family in (
            *("llama", "llama_sliding", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"),
            *("deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5", "mamba2"),
            *("granitemoehybrid", "kimi_linear"),
        )
    ),
    Subject("qwen3_vl, pictures", "qwen3_vl", sees=True),
    Subject("gemma4, pictures", "gemma4", sees=True),
    Subject("llama, kv_bits 4", "llama_wide", ("kv_bits:4", "kv_group_size:32")),
    Subject("gemma3, kv_bits 8", "gemma3_wide", ("kv_bits:8", "kv_group_size:32")),
    Subject("qwen3_next, kv_bits 8", "qwen3_next_wide", ("kv_bits:8", "kv_group_size:32")),
    Subject("llama, draft model", "llama", draft="qwen3"),
    Subject("qwen3_5, draft model", "qwen3_5", draft="llama"),
    Subject("qwen3_vl, pictures, draft model", "qwen3_vl", sees=True, draft="llama"),
    Subject("qwen3_5, MTP head", "qwen3_5", ("speculation:mtp",), head="mtp_head"),
    Subject("glm4_moe_lite, MTP head", "deepseek_v3", ("speculation:mtp",), head="nextn_head"),
    Subject("glm5_next, MTP head", "glm5_next", ("speculation:mtp",), head="glm5_next_head"),
    Subject("llama, EAGLE-3 head", "llama", ("speculation:mtp",), head="eagle_head"),
    Subject("gemma3, EAGLE-3 head", "gemma3_text", head="eagle_head"),
    Subject("qwen3, DFlash", "llama", ("speculation:mtp",), head="dflash"),
    Subject("qwen3, DFlash 2", "llama", ("speculation:mtp",), head="dflash2"),
    Subject("qwen3, DSpark", "llama", ("speculation:mtp",), head="dspark"),
    Subject("muse_glimmer, assistant", "llama", ("speculation:mtp",), head="muse"),
    Subject("laguna, DFlash", "llama", ("speculation:mtp",), head="laguna"),
)
_BLOCKS = "tiny_drafters"
# The script, its function that gives a model a head, and changes to the model; of a drafter of
# blocks, which script has several, the name is that of its kind.
HEADS: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "mtp_head": ("mtp_head", "add_head", {"num_hidden_layers": 4}),
    "nextn_head": (
        "nextn_head",
        "add_nextn",
        {"num_hidden_layers": 4, "model_type": "glm4_moe_lite"},
    ),
    "glm5_next_head": ("mtp_head", "add_head", {}),
    "eagle_head": ("eagle_head", "add_eagle", {"num_hidden_layers": 6}),
    **{
        kind: (_BLOCKS, "add_block", {**shape, "num_hidden_layers": 4})
        for kind, shape in (
            *((kind, {"model_type": "qwen3"}) for kind in ("dflash", "dflash2", "dspark")),
            *(("muse", MUSE), ("laguna", LAGUNA)),
        )
    },
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything about a reply that its request determines.

    Attributes:
        tokens: From the log-probabilities: ids with the likeliest alternatives.
        spoken: Content, thought and calls.
        count: Of its tokens; below the limit if something else ended it.
    """

    tokens: tuple[dict[str, Any], ...]
    spoken: tuple[str, ...]
    count: int


@dataclass(slots=True)
class Result:
    """The result of one subject."""

    name: str
    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cancelled: int = 0
    pauses: int = 0
    differences: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        wrong: The difference between the answers.
        tie: Likewise, where a greedy choice falls between two tokens of the same log-probability.
        apart: The distance of the same tokens' log-probabilities, beyond the tolerance.
    """

    wrong: str = ""
    tie: str = ""
    apart: float = 0.0


def verdict(found: Answer, expected: Answer, *, is_greedy: bool) -> Verdict:
    """Compare two answers."""
    apart = 0.0
    for place, (one, other) in enumerate(zip(found.tokens, expected.tokens, strict=False)):
        if one["id"] != other["id"]:
            gap = _gap(other)
            words = f"token {place}: {one['id']} for {other['id']}, the likeliest {gap:.2e} apart"
            is_tie = is_greedy and gap < TOLERANCE
            return Verdict(tie=words) if is_tie else Verdict(wrong=words)
        apart = max(apart, _distance(one, other))
    if (found.count, found.spoken) != (expected.count, expected.spoken):
        return Verdict(wrong=f"{found.count} tokens for {expected.count}, or other words")
    if apart > LIMIT:
        return Verdict(wrong=f"log-probabilities {apart:.2e} apart")
    return Verdict(apart=apart if apart > TOLERANCE else 0.0)


def _gap(token: dict[str, Any]) -> float:
    """Return the gap between the likeliest and the second token of a position."""
    first, second = (float(each["logprob"]) for each in token["top_logprobs"][:2])
    return first - second


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip([one, *one["top_logprobs"]], [other, *other["top_logprobs"]], strict=True)
    return max(abs(a["logprob"] - b["logprob"]) for a, b in pairs)


class Trial:
    """One subject on a server."""

    def __init__(self, subject: Subject, channel: grpc.aio.Channel, seed: int) -> None:
        self._subject = subject
        self._stub = backend_pb2_grpc.BackendStub(channel)
        self._inspector = backend_pb2_grpc.InspectorStub(channel)
        self._rng = Random(f"{seed} {subject.name}")
        self.result = Result(subject.name)

    async def run(self, tokens: int) -> None:
        """Compare about this many tokens."""
        await self._load()
        while self.result.tokens < tokens:
            count = min(WAVE_REQUESTS, 1 + (tokens - self.result.tokens) // MEAN_TOKENS)
            requests = requests_of(self._rng, count, sees=self._subject.sees)
            expected = [await self._answer(_without_drafts(request)) for request in requests]
            await self._wave(list(zip(requests, expected, strict=True)))
        report = await self._inspector.Inspect(pb.InspectRequest())
        self.result.drafted, self.result.accepted = report.drafted_tokens, report.accepted_tokens

    async def _load(self) -> None:
        subject = self._subject
        options = [*subject.options, f"expected_tokens:{EXPECTED_TOKENS}"]
        if subject.drafter:
            options.append(f"draft_model:{subject.drafter}")
        room = ROOM_ROWS * _row_bytes(subject)
        await self._stub.LoadModel(
            pb.ModelOptions(
                Model=subject.name,
                ModelFile=str(subject.directory),
                MaxModelLen=CONTEXT,
                Options=[*options, f"max_kv_bytes:{room}"],
            )
        )

    async def _wave(self, asked: Sequence[tuple[pb.PredictOptions, Answer]]) -> None:
        """Send requests from some clients, each of which takes the next one when it is done."""
        queue: Iterator[tuple[pb.PredictOptions, Answer]] = iter(
            self._rng.sample(asked, len(asked))
        )

        async def client() -> None:
            for request, expected in queue:
                if self._rng.random() < CANCELLED_SHARE:
                    await self._leave(request, expected)
                self._compare(request, await self._answer(request), expected)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._rng.randint(1, MOST_ROWS)):
                group.create_task(client())

    async def _leave(self, request: pb.PredictOptions, expected: Answer) -> None:
        """Cancel a stream somewhere; the received part must be the beginning of the reply."""
        call = self._stub.PredictStream(request)
        said, most = "", self._rng.randint(0, 9)
        async for reply in call:
            said += "".join(delta.content for delta in reply.chat_deltas)
            most -= 1
            if most < 0:
                break
        call.cancel()
        self.result.cancelled += 1
        if not expected.spoken[0].startswith(said):
            self._note(self.result.differences, request, "a cancelled stream began differently")

    def _compare(self, request: pb.PredictOptions, found: Answer, expected: Answer) -> None:
        self.result.requests += 1
        self.result.tokens += found.count
        told = verdict(found, expected, is_greedy=not request.Temperature)
        if told.wrong:
            self._note(self.result.differences, request, told.wrong)
        elif told.tie:
            self._note(self.result.ties, request, told.tie)
        elif told.apart:
            self.result.apart.append(told.apart)

    def _note(self, noted: list[str], request: pb.PredictOptions, words: str) -> None:
        shown = pb.PredictOptions()
        shown.CopyFrom(request)
        del shown.Images[:]
        noted.append(f"{words}: {' '.join(str(shown).split())}")

    async def _answer(self, request: pb.PredictOptions) -> Answer:
        replies = [reply async for reply in self._stub.PredictStream(request)]
        deltas = [delta for reply in replies for delta in reply.chat_deltas]
        calls = [call for delta in deltas for call in delta.tool_calls]
        listed = [json.loads(reply.logprobs) for reply in replies if reply.logprobs]
        return Answer(
            tokens=tuple(entry for body in listed for entry in body["content"]),
            spoken=(
                "".join(delta.content for delta in deltas),
                "".join(delta.reasoning_content for delta in deltas),
                "".join(call.name for call in calls),
                "".join(call.arguments for call in calls),
            ),
            count=replies[-1].tokens,
        )


def _without_drafts(request: pb.PredictOptions) -> pb.PredictOptions:
    plain = pb.PredictOptions()
    plain.CopyFrom(request)
    plain.Metadata["speculation"] = "off"
    return plain


def _directory(family: str, kind: str = "") -> Path:
    return CACHE / (f"equality-{kind}" if kind else "equality") / family


def _build(subject: Subject) -> None:
    """Build the missing models of a subject."""
    from scripts import tiny_models, tiny_vision

    if subject.head:
        _build_with_head(subject)
        return
    builds: list[tuple[Path, Callable[[str, Path], Path]]] = [
        (subject.directory, tiny_vision.build if subject.sees else tiny_models.build)
    ]
    if subject.draft:
        builds.append((_directory(subject.draft), tiny_models.build))
    for directory, build in builds:
        if not directory.exists():
            part = directory.with_suffix(".part")
            build(directory.name, part).rename(directory)


def _build_with_head(subject: Subject) -> None:
    from scripts import tiny_models
    from scripts.sweep.vision_models import build_vision_model

    if subject.directory.exists() or subject.drafter is None:
        return
    build = tiny_models.build if subject.family in tiny_models.FAMILIES else build_vision_model
    script, name, changes = HEADS[subject.head]
    add = getattr(importlib.import_module(f"scripts.{script}"), name)
    kind = {"kind": subject.head} if script == _BLOCKS else {}
    part = subject.directory.with_suffix(".part")
    build(subject.family, part, **changes)
    add(part, subject.drafter, is_right=True, **kind)
    part.rename(subject.directory)


def _row_bytes(subject: Subject) -> int:
    """Return the size of the KV caches of a whole context."""
    from backend.engine.footprint import forecast

    draft = str(subject.drafter) if subject.drafter else None
    tuning = TuningOptions.of(draft_model=draft)
    foreseen = forecast(ModelOptions(model=subject.name, tuning=tuning), subject.directory)
    return foreseen.caches[0].profile.row_bytes(CONTEXT)


async def compare(subject: Subject, tokens: int, seed: int) -> Result:
    """Start a server, and compare about this many tokens of a subject."""
    _build(subject)
    with TemporaryDirectory(prefix="mlx-backend-equality-") as directory:
        log = Path(directory) / "server.log"
        with ServerProcess.start(log) as process:
            await process.wait_until_ready()
            async with grpc.aio.insecure_channel(process.address) as channel:
                trial = Trial(subject, channel, seed)
                await trial.run(tokens)
        text = log.read_text(encoding="utf-8")
        trial.result.pauses = text.count(PAUSED)
        return trial.result


def _print(result: Result) -> None:
    click.echo(
        f"{result.name}: {result.tokens:,} tokens of {result.requests} requests, "
        f"{result.drafted:,} drafted, {result.accepted:,} right, {result.cancelled} cancelled, "
        f"{result.pauses} paused, {len(result.ties)} ties, {len(result.differences)} differences, "
        f"{len(result.apart)} with log-probabilities up to {max(result.apart, default=0):.1e} apart"
    )
    for words in (*result.ties, *result.differences):
        click.echo(f"    {words}")


@click.command()
@click.option("--tokens", default=100_000, show_default=True, help="To compare, of all families.")
@click.option("--seed", default=0, show_default=True, help="Of all random choices.")
@click.option("--only", multiple=True, help="Compare this family.")
def main(*, tokens: int, seed: int, only: tuple[str, ...]) -> None:
    """Compare replies with and without drafts, in every family."""
    chosen = [each for each in SUBJECTS if not only or each.family in only or each.name in only]
    results = []
    for subject in chosen:
        results.append(asyncio.run(compare(subject, -(-tokens // len(chosen)), seed)))
        _print(results[-1])
    click.echo(f"{sum(result.tokens for result in results):,} tokens")
    sys.exit(any(result.differences for result in results))
