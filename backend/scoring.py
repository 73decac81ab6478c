"""The pipeline of Score: candidates as what a prompt goes on with, and their log-probabilities."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from backend.core.prompt import Prompt
from backend.core.scoring import ScoreCall, ScoredCandidate, ScoredToken, ScoreRequest
from backend.errors import InvalidRequestError
from backend.intake import (
    SideEngine,
    loaded,
    require_decoder,
    require_fit,
    require_possible_fit,
    require_same,
)
from backend.model.loaded import LoadedModel
from backend.model.prefix import common_length

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to compute, and where in each continuation the candidate's own tokens begin."""

    request: ScoreRequest
    starts: tuple[int, ...]


async def score(call: ScoreCall, engine: SideEngine) -> tuple[ScoredCandidate, ...]:
    """Return the candidates' log-probabilities in their order; cancel to leave.

    A candidate is tokenised together with the prompt: its tokens are those from which on it
    differs from the prompt alone.

    Raises:
        InvalidRequestError: A candidate adds no token, or does not fit the context.
        RequestCancelledError: Another model was loaded before the engine had the candidates.
        UnsupportedError: The model predicts no tokens.
    """
    started = time.monotonic()
    model, _ = loaded(engine)
    require_decoder("Score", model)
    plan = await asyncio.to_thread(_plan, call, model)
    require_same(model, engine.model)
    scored = await engine.score(plan.request)
    log.info(
        "score id=%s prompt_tokens=%d candidates=%d ms=%.0f",
        plan.request.request_id,
        len(plan.request.prompt.token_ids),
        len(scored),
        (time.monotonic() - started) * 1000.0,
    )
    return tuple(
        _candidate(token_ids[start:], logprobs[start:], model)
        for token_ids, logprobs, start in zip(
            plan.request.continuations, scored, plan.starts, strict=True
        )
    )


def _plan(call: ScoreCall, model: LoadedModel) -> _Plan:
    require_possible_fit("prompt", call.prompt, model)
    prompt = model.tokenizer.encode_prompt(call.prompt)
    require_fit("prompt", prompt, model)
    wholes = [
        _with_prompt(call.prompt, candidate, f"candidates[{i}]", model)
        for i, candidate in enumerate(call.candidates)
    ]
    starts = [common_length(prompt, whole) for whole in wholes]
    for i, (start, whole) in enumerate(zip(starts, wholes, strict=True)):
        if start == len(whole):
            raise InvalidRequestError(f"candidates[{i}]", "adds no token to the prompt")
    shared = min(starts)
    if shared == 0:
        problem = "is empty" if not prompt else "shares no token with prompt and candidate"
        raise InvalidRequestError("prompt", problem)
    request = ScoreRequest(
        request_id=uuid.uuid4().hex[:12],
        prompt=Prompt(tuple(prompt[:shared]), boundaries=_boundaries(call, prompt[:shared], model)),
        continuations=tuple(tuple(whole[shared:]) for whole in wholes),
    )
    return _Plan(request, tuple(start - shared for start in starts))


def _with_prompt(prompt: str, candidate: str, field: str, model: LoadedModel) -> list[int]:
    require_possible_fit(field, prompt + candidate, model)
    token_ids = model.tokenizer.encode_prompt(prompt + candidate)
    require_fit(field, token_ids, model)
    return token_ids


def _boundaries(call: ScoreCall, prompt: Sequence[int], model: LoadedModel) -> tuple[int, ...]:
    """Return where later prompts are expected to branch off, in tokens."""
    stable = call.prompt.encode()[: call.stable_prefix_bytes].decode(errors="ignore")
    shared = common_length(prompt, model.tokenizer.encode_prompt(stable)) if stable else 0
    return (shared,) if 0 < shared < len(prompt) else ()


def _candidate(
    token_ids: Sequence[int], logprobs: Sequence[float], model: LoadedModel
) -> ScoredCandidate:
    return ScoredCandidate(
        tuple(
            ScoredToken(model.tokenizer.token_bytes(token_id).decode(errors="replace"), logprob)
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        )
    )
