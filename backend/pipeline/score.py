"""The pipeline of Score: log-probabilities of candidates that continue a prompt."""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from backend.core.prompt import Prompt
from backend.core.scoring import ScoreCall, ScoredCandidate, ScoredToken, ScoreRequest
from backend.errors import InvalidRequestError
from backend.model.text.prefix import common_length
from backend.pipeline import worker_pool
from backend.pipeline.served_model import ComputeEngine, ServedModel
from backend.pipeline.validation import require_decoder, require_fit, require_possible_fit
from common.rpc import require_caller

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The request, and the offset of the candidate's own tokens in each continuation."""

    request: ScoreRequest
    starts: tuple[int, ...]


async def score(
    call: ScoreCall, model: ServedModel, engine: ComputeEngine
) -> tuple[ScoredCandidate, ...]:
    """Return the candidates' log-probabilities, in call order.

    A candidate is tokenised together with the prompt. Its own tokens begin where the result first
    differs from the prompt's tokens.

    Raises:
        InvalidRequestError: A candidate adds no token, or does not fit the context.
        RequestCancelledError: Another model has replaced this one.
        UnsupportedError: The model does not predict tokens.
    """
    started = time.monotonic()
    require_decoder("Score", model)
    size_bytes = len(call.prompt) * len(call.candidates) + sum(map(len, call.candidates))
    plan = await worker_pool.run(lambda: _plan(call, model), size_bytes=size_bytes)
    scored = await engine.compute(model, plan.request)
    log.info(
        "score id=%s prompt_tokens=%d candidates=%d ms=%.0f",
        plan.request.request_id,
        len(plan.request.prompt.token_ids),
        len(scored.logprobs),
        (time.monotonic() - started) * 1000.0,
    )
    return tuple(
        _candidate(token_ids[start:], logprobs[start:], model)
        for token_ids, logprobs, start in zip(
            plan.request.continuations, scored.logprobs, plan.starts, strict=True
        )
    )


def _plan(call: ScoreCall, model: ServedModel) -> _Plan:
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
        prompt=Prompt(
            tuple(prompt[:shared]),
            boundaries=_boundaries(call, prompt[:shared], model),
            scope=model.own_scope(),
        ),
        continuations=tuple(tuple(whole[shared:]) for whole in wholes),
    )
    return _Plan(request, tuple(start - shared for start in starts))


def _with_prompt(prompt: str, candidate: str, field: str, model: ServedModel) -> list[int]:
    require_caller()
    require_possible_fit(field, prompt + candidate, model)
    token_ids = model.tokenizer.encode_prompt(prompt + candidate)
    require_fit(field, token_ids, model)
    return token_ids


def _boundaries(call: ScoreCall, prompt: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """Return the token position where later prompts are expected to branch off."""
    stable = call.prompt.encode()[: call.stable_prefix_bytes].decode(errors="ignore")
    shared = common_length(prompt, model.tokenizer.encode_prompt(stable)) if stable else 0
    return (shared,) if 0 < shared < len(prompt) else ()


def _candidate(
    token_ids: Sequence[int], logprobs: Sequence[float], model: ServedModel
) -> ScoredCandidate:
    return ScoredCandidate(
        tuple(
            ScoredToken(model.tokenizer.token_bytes(token_id).decode(errors="replace"), logprob)
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        )
    )
