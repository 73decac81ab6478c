"""Models that four processes can share, and a mixed workload to compare their results."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_driver import make_request, numbers_in, prompt_of
from engine_events import events_of

from backend.config import ModelOptions, TuningOptions
from backend.core.guide import Guide, ReplyRule
from backend.core.prompt import Prompt
from backend.core.request import SamplingParams
from backend.core.scoring import EmbeddingRequest, Pooling, ScoreRequest
from backend.core.step import PrefillDone, TokenStep
from backend.engine.engine import Engine
from scripts.tiny_models import build

GRAMMAR = 'root ::= "[" item ("," item)* "]"\nitem ::= "ba" | "be" | [0-9]+'
LONG = 200


def build_divisible(family: str, directory: Path, layers: int) -> Path:
    """Write a tiny model with four heads of each kind.

    More processes than cores wait long for each other, in every layer: four want few of them.
    """
    changes: dict[str, Any] = {"num_key_value_heads": 4, "num_hidden_layers": layers}
    if family == "gpt_oss":
        changes["layer_types"] = ["full_attention", "sliding_attention"][:layers]
    return build(family, directory, **changes)


def grouped(directory: Path, size: int, **tuning: Any) -> ModelOptions:
    """Ask for a model on so many processes of this machine."""
    options = TuningOptions.of(
        **{"tensor_parallel_size": size, "max_cache_bytes": 2**26, "prefill_chunk": 64, **tuning}
    )
    return ModelOptions(model=str(directory), tuning=options)


@dataclass
class Outcome:
    """The results of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0


async def take(
    engine: Engine, request: Any, outcome: Outcome | None = None, *, leave_after: int | None = None
) -> Outcome:
    """Take a stream, or leave it after some tokens."""
    outcome = Outcome() if outcome is None else outcome
    try:
        async for events in engine.submit(engine.model, request):
            for event in events_of(events):
                match event:
                    case PrefillDone(cached_tokens):
                        outcome.cached_tokens = cached_tokens
                    case TokenStep(token, _, logprobs):
                        outcome.tokens.append(token)
                        outcome.logprobs += [logprobs.logprob] if logprobs else []
            if leave_after is not None and len(outcome.tokens) >= leave_after:
                break
    finally:
        engine.cancel(request.request_id)
    return outcome


def mixed_requests(engine: Engine, salt: str) -> list[Any]:
    """Eight requests of all kinds; those of another salt have the same prompts."""
    warm = SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    narrow = SamplingParams(temperature=0.7, top_k=20, min_p=0.02, seed=11)
    penalised = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2)
    guide = Guide(rule=ReplyRule(text=GRAMMAR))
    shared = prompt_of(90, 3)
    return [
        make_request(f"plain{salt}", prompt_of(20)),
        make_request(f"long{salt}", prompt_of(LONG, 1), max_tokens=6),
        make_request(f"warm{salt}", prompt_of(33, 2), sampling=warm, max_tokens=14),
        make_request(f"narrow{salt}", [*shared, 5], sampling=narrow, max_tokens=10),
        make_request(f"shared{salt}", [*shared, 6, 7], top_logprobs=3),
        make_request(f"penalised{salt}", prompt_of(50, 4), sampling=penalised, max_tokens=14),
        make_request(
            f"guided{salt}",
            prompt_of(12, 5),
            guide=guide,
            max_tokens=12,
            sampling=SamplingParams(temperature=1.0, seed=3),
            stop=engine.model.card.eos_token_ids,
        ),
        make_request(f"left{salt}", prompt_of(60, 6), max_tokens=500),
    ]


@dataclass
class Findings:
    """The results of a model for the workload, in the order of its requests."""

    first: Sequence[Outcome]
    again: Sequence[Outcome]
    scores: Sequence[Sequence[float]]
    embedding: Sequence[float]


async def find_out(engine: Engine, options: ModelOptions) -> Findings:
    """Load a model and run the workload: once, then again beside jobs."""
    await engine.load(options)
    requests = mixed_requests(engine, "")
    first = await asyncio.gather(
        *(take(engine, request) for request in requests[:-1]),
        take(engine, requests[-1], leave_after=4),
    )
    prompt = Prompt(tuple(prompt_of(40, 9)))
    score = ScoreRequest(request_id="score", prompt=prompt, continuations=((1, 2, 3), (4,)))
    text = EmbeddingRequest(
        token_ids=tuple(prompt_of(70, 8)), pooling=Pooling.MEAN, is_normalized=True
    )
    scoring = asyncio.ensure_future(engine.compute(engine.model, score))
    embedding = asyncio.ensure_future(engine.compute(engine.model, text))
    again = await asyncio.gather(
        *(take(engine, request) for request in mixed_requests(engine, "-again")[:-1])
    )
    return Findings(first[:-1], again, await scoring, numbers_in(await embedding))


def descendants(process_id: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and parent_of(int(entry.name)) == process_id:
            found += [int(entry.name), *descendants(int(entry.name))]
    return found


def workers() -> list[int]:
    """Return the processes that compute for this one: rank 0 first, then its own, by rank."""
    return workers_of(os.getpid())


def workers_of(process_id: int) -> list[int]:
    """Return the same of another process; those that render templates are not among them."""
    found = [number for number in descendants(process_id) if _is_worker(number)]
    return sorted(found, key=lambda number: (parent_of(number) != process_id, number))


def _is_worker(process_id: int) -> bool:
    place = Path(f"/proc/{process_id}")
    try:
        # A forked one has the name, but the command line of the process it was forked from.
        return any(b"backend.rank" in (place / file).read_bytes() for file in ("cmdline", "comm"))
    except OSError:
        return False


def parent_of(process_id: int) -> int | None:
    """Return the parent of a living process, zombies not among them."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]
    return None if state == "Z" else int(parent)


def is_alive(process_id: int) -> bool:
    """Tell whether a process still does something: a zombie does not."""
    return parent_of(process_id) is not None
