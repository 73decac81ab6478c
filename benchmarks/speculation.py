"""What does it save to draft tokens? The same requests with drafts and without, in one run."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from backend.pb import backend_pb2 as pb
from benchmarks.figure import Figure, Settings, Target, at_least
from benchmarks.models import LARGE, NEAR, RIGHT, SMALL, WRONG, BenchModel
from benchmarks.served import Served, served

PROMPT_TOKENS = 90
NEW_TOKENS = 128
ROWS = (1, 4, 8, 16)
NO_LOSS = at_least(0.97)
# Replies of so few tokens repeat themselves.
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


def repeating(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a request for a text that repeats itself."""
    return pb.PredictOptions(Prompt=prompt, LogitBias=FEW_TOKENS, Seed=seed)


def free(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a request for a text that nobody can foresee."""
    return pb.PredictOptions(Prompt=prompt, Temperature=1.0, Seed=seed)


def likeliest(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a greedy request: two random models draw nearly the same of a seed when they draw."""
    return pb.PredictOptions(Prompt=prompt, Seed=seed)


def calling(prompt: str, seed: int) -> pb.PredictOptions:
    """Return a request that has to call a tool."""
    return pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[pb.Message(role="user", content=prompt)],
        Tools=json.dumps([TOOL]),
        ToolChoice="required",
        Temperature=1.0,
        Seed=seed,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of replies, and the gain that it should bring by the number of rows."""

    name: str
    request: Callable[[str, int], pb.PredictOptions]
    targets: Mapping[int, Target]
    ends_by_itself: bool = False


CASES = (
    Case("text that repeats itself", repeating, {1: at_least(2.5), 8: at_least(1.5)}),
    Case("required tool call", calling, {1: at_least(2.0)}, ends_by_itself=True),
    Case("free text", free, dict.fromkeys(ROWS, NO_LOSS)),
)


DRAFTED = {
    RIGHT: Case("greedy text", likeliest, {1: at_least(1.3)}),
    NEAR: Case("greedy text", likeliest, {1: at_least(1.3)}),
    WRONG: Case("greedy text", likeliest, dict.fromkeys(ROWS, NO_LOSS)),
}
"""Models with a draft model, which alone drafts."""


async def measure(settings: Settings) -> list[Figure]:
    """Measure every case; the small model has to do for a quick look, without a draft model."""
    figures = []
    for model in (SMALL,) if settings.is_quick else (SMALL, LARGE):
        async with served(model) as server:
            for case in CASES:
                figures += [await _measure(settings, model, case, rows, server) for rows in ROWS]
    for model, case in () if settings.is_quick else DRAFTED.items():
        async with served(model, f"draft_model:{model.draft}", "speculation:draft") as server:
            figures += [await _measure(settings, model, case, rows, server) for rows in ROWS]
    return figures


async def _measure(
    settings: Settings, model: BenchModel, case: Case, rows: int, server: Served
) -> Figure:
    prompts = [await server.prompt(PROMPT_TOKENS, row) for row in range(rows)]
    speeds: dict[str, list[float]] = {"auto": [], "off": []}
    for run in range(settings.runs + 1):
        for mode, samples in speeds.items():
            requests = []
            for row, prompt in enumerate(prompts):
                request = case.request(prompt, 1000 * run + row)
                request.Metadata["speculation"] = mode
                request.IgnoreEOS = not case.ends_by_itself
                request.Tokens = NEW_TOKENS
                requests.append(request)
            seconds, tokens = await server.time_together(requests)
            if run:  # the first one warms up
                samples.append(tokens / seconds)
    pairs = zip(speeds["auto"], speeds["off"], strict=True)
    return Figure(
        name=f"{model.name}: {case.name}, {rows} {'row' if rows == 1 else 'rows'}",
        unit="x plain",
        samples=tuple(drafted / plain for drafted, plain in pairs),
        target=case.targets.get(rows),
        context={
            "plain tokens/s": median(speeds["off"]),
            "tokens/s": median(speeds["auto"]),
        },
    )
