"""What does parsing a reply cost per token, compared to a decode step?"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from backend.core.step import FinishReason, TokenStep
from backend.formats.format import FormatEvidence
from backend.output.detection import detect
from backend.output.replay import ChunkDetokenizer, cut_randomly
from backend.output.reply import ReplyCursor, ReplySpec
from benchmarks.harness.baseline import Baseline, environment_of
from benchmarks.harness.figure import Figure, Settings, at_most
from benchmarks.harness.models import LARGE
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Sampling, Workload, words

TOOLS = {"note_add": {"properties": {"text": {"type": "string"}}}}
PROMPT_TOKENS, STEPS = 90, 48
SHORT_CHARS, LONG_CHARS = 1000, 100_000
PARTS = 3
WORD_CHARS = 5
TEXT = "TEXT"


@dataclass(frozen=True, slots=True)
class Family:
    """A reply that thinks, talks and calls, each of the three at the length of `TEXT`."""

    tools: str
    reasoning: str
    reply: str

    @property
    def name(self) -> str:
        """Both halves of its format."""
        return f"{self.tools}+{self.reasoning}"


THOUGHT = f"<think>\n{TEXT}\n</think>\n\n{TEXT}\n"
NEXT = "<|start|>assistant"
FORMATS = (
    Family(
        "hermes_json",
        "think",
        f'{THOUGHT}<tool_call>\n{{"name": "note_add", "arguments": {{"text": "{TEXT}"}}}}\n'
        "</tool_call>",
    ),
    Family(
        "qwen3_coder_xml",
        "think",
        f"{THOUGHT}<tool_call>\n<function=note_add>\n<parameter=text>\n{TEXT}\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    Family(
        "harmony",
        "harmony",
        f"<|channel|>analysis<|message|>{TEXT}<|end|>{NEXT}<|channel|>commentary<|message|>{TEXT}"
        f"<|end|>{NEXT}<|channel|>commentary to=functions.note_add <|constrain|>json<|message|>"
        f'{{"text": "{TEXT}"}}<|call|>',
    ),
    # The family has no thoughts, and calls make up the whole reply.
    Family(
        "llama3_json",
        "none",
        f'{{"name": "note_add", "parameters": {{"text": "{TEXT}{TEXT}{TEXT}"}}}}',
    ),
    Family(
        "mistral",
        "mistral_think",
        f'[THINK]{TEXT}[/THINK]{TEXT}[TOOL_CALLS]note_add[ARGS]{{"text": "{TEXT}"}}',
    ),
)


async def measure(settings: Settings) -> list[Figure]:
    """Measure replies of both lengths on every family, with decode steps in between."""
    steps_ms: list[float] = []
    costs: dict[Family, list[tuple[float, float]]] = {family: [] for family in FORMATS}
    async with served(LARGE) as server:
        environment = environment_of(server.process.pid)
        with Baseline(LARGE, environment) as baseline:
            for run in range(settings.runs + 1):
                speed = baseline.run(await _workload(server, run))
                steps_ms.append(1000.0 / speed.decode)
                for family, samples in costs.items():
                    samples.append((_cost_us(family, SHORT_CHARS), _cost_us(family, LONG_CHARS)))
    # The first run warms all of them up.
    return [
        figure
        for family, samples in costs.items()
        for figure in _figures(family, steps_ms[1:], samples[1:])
    ]


async def _workload(server: Served, run: int) -> Workload:
    return Workload((await server.prompt(PROMPT_TOKENS, run),), (Sampling(),), STEPS)


def _cost_us(family: Family, chars: int) -> float:
    """Return microseconds per token, over enough replies to make up a long one."""
    text = words(chars // PARTS // WORD_CHARS, chars)
    chunks = cut_randomly(family.reply.replace(TEXT, text), family.name)
    replies = LONG_CHARS // chars
    return sum(_read_us(family, chunks) for _ in range(replies)) / (replies * len(chunks))


def _read_us(family: Family, chunks: Sequence[str]) -> float:
    """Parse a reply token by token, and return the microseconds.

    Raises:
        ValueError: The reply was not parsed as a call, so the figure would be meaningless.
    """
    evidence = FormatEvidence((), "", tool_parser=family.tools, reasoning_parser=family.reasoning)
    spec = ReplySpec(format=detect(evidence), tools=TOOLS)
    cursor = ReplyCursor(spec, ChunkDetokenizer(chunks), lambda _: b"")
    steps = [[TokenStep(token_id)] for token_id in range(len(chunks))]
    started = time.perf_counter()
    for step in steps:
        cursor.advance(step)
    _, finish = cursor.advance([TokenStep(0, FinishReason.STOP)])
    took_us = (time.perf_counter() - started) * 1e6
    if finish is None or finish.reason is not FinishReason.TOOL_CALLS:
        raise ValueError(family.name)
    return took_us


def _figures(
    family: Family, steps_ms: Sequence[float], costs_us: Sequence[tuple[float, float]]
) -> list[Figure]:
    steps_us = [1000.0 * step_ms for step_ms in steps_ms]
    pairs = zip(costs_us, steps_us, strict=True)
    return [
        Figure(
            name=f"router: {family.name}",
            unit="% of a step",
            samples=tuple(100.0 * short_us / step_us for (short_us, _), step_us in pairs),
            target=at_most(2),
            context={
                "us per token": median(short_us for short_us, _ in costs_us),
                "step ms": median(steps_ms),
            },
        ),
        Figure(
            name=f"router: {family.name}, {LONG_CHARS} characters over {SHORT_CHARS}",
            unit="x per token",
            samples=tuple(long_us / short_us for short_us, long_us in costs_us),
            target=at_most(1.2),
            context={"us per token": median(long_us for _, long_us in costs_us)},
        ),
    ]
