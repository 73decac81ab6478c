"""How much do drafts save? The same requests with and without drafts, in one run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean, median
from typing import NamedTuple

from backend.demo import WEATHER_TOOL
from backend.pb import backend_pb2 as pb
from benchmarks.harness.figure import Figure, Settings, Target, at_least
from benchmarks.harness.models import (
    EDITOR,
    HEADED,
    LARGE,
    NEAR,
    RIGHT,
    SMALL,
    WRONG,
    BenchModel,
    ensure_trained,
)
from benchmarks.harness.served import Served, served
from scripts.demo_model.edits import draw_edit

PROMPT_TOKENS = 90
NEW_TOKENS = 128
ROWS = (1, 4, 8, 16)
ALWAYS = dict.fromkeys(ROWS, at_least(0.97))
# Replies of so few different tokens repeat themselves.
FEW_TOKENS = json.dumps(dict.fromkeys(("300", "400", "500", "600"), 60))
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather_forecast",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Bergen", "Trondheim"]},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                "include_hourly_values": {"type": "boolean"},
                "number_of_days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": [
                *("city", "temperature_unit", "include_hourly_values", "number_of_days"),
            ],
        },
    },
}
EDITED_LINES = 10
# More than any edit of this many lines has.
EDIT_TOKENS = 400


def repeating(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a request for a text that repeats itself."""
    return pb.PredictOptions(Prompt=prompt, LogitBias=FEW_TOKENS, Seed=seed)


def free(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a request for an unpredictable text."""
    return pb.PredictOptions(Prompt=prompt, Temperature=1.0, Seed=seed)


def likeliest(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a greedy request: sampling with one seed, two random models draw nearly the same."""
    return pb.PredictOptions(Prompt=prompt, Seed=seed)


def calling(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a request that must call a tool."""
    return pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[pb.Message(role="user", content=prompt)],
        Tools=json.dumps([TOOL]),
        ToolChoice="required",
        Temperature=1.0,
        Seed=seed,
    )


def asked(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a greedy chat request, answered without a thought."""
    return pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[pb.Message(role="user", content=prompt)],
        Metadata={"enable_thinking": "false"},
        Seed=seed,
    )


def called(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a greedy request that must call the tool that the demo model was trained on."""
    request = asked(prompt, seed)
    request.Tools, request.ToolChoice = json.dumps([WEATHER_TOOL]), "required"
    return request


def called_unknown(prompt: str, seed: int) -> pb.PredictOptions:
    """Return the same for a tool whose names the model splits differently."""
    request = called(prompt, seed)
    request.Tools = json.dumps([TOOL])
    return request


def question(row: int) -> str:
    """Return a question that the tool answers."""
    cities = TOOL["function"]["parameters"]["properties"]["city"]["enum"]
    return f"What is the weather in {cities[row % len(cities)]}?"


def code_to_edit(row: int) -> str:
    """Return a piece of code, with a request to change it."""
    return draw_edit(Random(1_000_000 + row), EDITED_LINES).question


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of reply, and its target gain by the number of rows.

    Attributes:
        prompt: Returns the prompt of a row; `None` uses invented words.
        tokens: Maximum per reply.
    """

    name: str
    request: Callable[[str, int], pb.PredictOptions]
    targets: Mapping[int, Target]
    ends_by_itself: bool = False
    prompt: Callable[[int], str] | None = None
    tokens: int = NEW_TOKENS


CASES = (
    Case(
        "text that repeats itself",
        repeating,
        {1: at_least(2.5), 8: at_least(1.5), 16: at_least(0.97)},
    ),
    Case("required tool call", calling, {1: at_least(2.0)}, ends_by_itself=True),
    Case("free text", free, ALWAYS),
)

EDITING = Case(
    "edit of code",
    asked,
    {1: at_least(2.5), 8: at_least(1.5)},
    ends_by_itself=True,
    prompt=code_to_edit,
    tokens=EDIT_TOKENS,
)
TRAINED = (
    EDITING,
    Case("required tool call", called, {1: at_least(2.0)}, ends_by_itself=True, prompt=question),
    Case("call of an unknown tool", called_unknown, {}, ends_by_itself=True, prompt=question),
    Case("free text", free, ALWAYS),
)
"""For the model trained to edit and call."""

DRAFTED = {
    EDITOR: replace(EDITING, targets={1: at_least(1.3)}),
    RIGHT: Case("greedy text", likeliest, {1: at_least(1.3)}),
    NEAR: Case("greedy text", likeliest, {1: at_least(1.3)}),
    WRONG: Case("greedy text", likeliest, ALWAYS),
}
"""Models whose draft model is the only source of drafts."""

HEAD_CASES = {
    model: Case(
        "greedy text", likeliest, {**ALWAYS, 1: at_least(1.3)} if model.shape[-1] else ALWAYS
    )
    for model in HEADED
}
"""Models whose head is the only source of drafts."""


class _Run(NamedTuple):
    """The replies of one mode to a case's requests.

    Attributes:
        replies: The seconds and tokens of each.
        processor_s: The processor seconds of all, if known.
    """

    replies: Sequence[tuple[float, int]]
    processor_s: float | None

    @property
    def tokens(self) -> int:
        """The tokens of all replies."""
        return sum(tokens for _, tokens in self.replies)

    @property
    def per_s(self) -> float:
        """Tokens per second, until the last reply ends."""
        return self.tokens / max(seconds for seconds, _ in self.replies)

    @property
    def reply_per_s(self) -> float:
        """Tokens per second of a reply, on average."""
        return mean(tokens / seconds for seconds, tokens in self.replies)

    @property
    def per_processor_s(self) -> float | None:
        """Tokens per second of the engine's processor time, if known."""
        return self.tokens / self.processor_s if self.processor_s else None


async def measure(settings: Settings) -> list[Figure]:
    """Measure every case; a quick run uses only the small model, without a draft model."""
    if settings.is_quick:
        return await _measured(settings, SMALL, CASES)
    ensure_trained()
    figures = []
    for model, cases in ((SMALL, CASES), (LARGE, CASES), (EDITOR, TRAINED)):
        figures += await _measured(settings, model, cases)
    for model, case in DRAFTED.items():
        drafted = replace(case, name=f"{case.name}, draft model")
        figures += await _measured(settings, model, [drafted], *_alone(model, "draft"))
    return figures


async def measure_heads(settings: Settings) -> list[Figure]:
    """Measure heads that are always right or always wrong; nothing in a quick run."""
    figures = []
    for model, case in () if settings.is_quick else HEAD_CASES.items():
        figures += await _measured(settings, model, [case], *_alone(model, "mtp"))
    return figures


def _alone(model: BenchModel, speculation: str) -> tuple[str, str]:
    return f"draft_model:{model.draft}", f"speculation:{speculation}"


async def _measured(
    settings: Settings, model: BenchModel, cases: Sequence[Case], *options: str
) -> list[Figure]:
    async with served(model, *options) as server:
        return [
            await _measure(settings, model, case, rows, server) for case in cases for rows in ROWS
        ]


async def _measure(
    settings: Settings, model: BenchModel, case: Case, rows: int, server: Served
) -> Figure:
    prompts = [
        case.prompt(row) if case.prompt else await server.prompt(PROMPT_TOKENS, row)
        for row in range(rows)
    ]
    runs: dict[str, list[_Run]] = {"auto": [], "off": []}
    for number in range(settings.runs + 1):
        for mode, samples in runs.items():
            seeds = range(1000 * number, 1000 * number + rows)
            requests = [_requested(case, *pair, mode) for pair in zip(prompts, seeds, strict=True)]
            samples.append(await _timed(server, requests))
    name = f"{model.name}: {case.name}, {rows} {'row' if rows == 1 else 'rows'}"
    # The first ones warm up.
    return _figure(name, case.targets.get(rows), *(samples[1:] for samples in runs.values()))


def _requested(case: Case, prompt: str, seed: int, mode: str) -> pb.PredictOptions:
    request = case.request(prompt, seed)
    request.Metadata["speculation"] = mode
    request.IgnoreEOS = not case.ends_by_itself
    request.Tokens = case.tokens
    return request


async def _timed(server: Served, requests: Sequence[pb.PredictOptions]) -> _Run:
    before = await server.engine_seconds()
    replies = await server.time_together(requests)
    after = await server.engine_seconds()
    used = None if before is None or after is None else after - before
    return _Run(replies, used)


def _figure(
    name: str, target: Target | None, drafted: Sequence[_Run], plain: Sequence[_Run]
) -> Figure:
    pairs = list(zip(drafted, plain, strict=True))
    gains = [
        one.per_processor_s / other.per_processor_s
        for one, other in pairs
        if one.per_processor_s and other.per_processor_s
    ]
    context = {
        "plain tokens/s": median(run.per_s for run in plain),
        "tokens/s": median(run.per_s for run in drafted),
        "by reply": median(one.reply_per_s / other.reply_per_s for one, other in pairs),
        **({"by processor time": median(gains)} if gains else {}),
    }
    samples = tuple(one.per_s / other.per_s for one, other in pairs)
    return Figure(name=name, unit="x plain", samples=samples, target=target, context=context)
