"""The pipeline of Score with a question: how likely each answer is, by a decision model.

A question and its options are written before the text, a mask before each option. The network
gives a logit for each mask; a calibrated softmax over them is the answer.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from backend.config import MAX_TOKEN_IDS
from backend.core.prompt import JsonValue
from backend.core.scoring import (
    DecideRequest,
    Decision,
    DecisionProfile,
    QuestionType,
    ScoreCall,
    ScoredCandidate,
    ScoredToken,
)
from backend.errors import ContextLengthError, InvalidRequestError
from backend.pipeline import worker_pool
from backend.pipeline.served_model import (
    ComputeEngine,
    ServedModel,
    require_bounded,
    require_decoder,
)

# As the model was trained: names of types, words of the two answers to a statement, and limits.
_NAMES = {
    QuestionType.CHOICE: "choice",
    QuestionType.SCORE: "score",
    QuestionType.BOOL: "noul",
}
_STATEMENT = {
    "false": "false: no, the statement does not hold",
    "true": "true: yes, the statement holds",
}
_OPTION_TOKENS = 48
_LEAST_QUESTION_TOKENS = 16
# Numbers of options up to which a temperature is meant, by its name.
_BUCKETS = ((2, "2"), (5, "3-5"), (10, "6-10"), (math.inf, "11+"))
_DIGITS = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The candidates of a call, each as one token, and the answer as mlx-vlm words it."""

    candidates: tuple[ScoredCandidate, ...]
    answer: Mapping[str, JsonValue]


async def decide(call: ScoreCall, model: ServedModel, engine: ComputeEngine) -> Verdict:
    """Return the answer to a question about a text; cancel to abandon the work.

    The prompt begins with the question, which is its stable prefix; the rest is the text.
    """
    started = time.monotonic()
    profile = model.card.decisions
    if profile is None:
        require_decoder("Score", model)
        problem = "is not served: this model scores candidates as plain text"
        raise InvalidRequestError("question_type", problem)
    if call.question_type is None:
        types = ", ".join(each.value for each in QuestionType)
        raise InvalidRequestError("question_type", f"is empty: this model answers {types}")
    labels = _labels(call.question_type, call.candidates)
    request = await worker_pool.run(
        partial(_request, call, call.question_type, labels, profile, model),
        size_bytes=len(call.prompt) + sum(map(len, call.candidates)),
    )
    decision = await engine.compute(model, request)
    verdict = _verdict(call.question_type, labels, profile, decision)
    spent_ms = (time.monotonic() - started) * 1000.0
    log.info("decision prompt_tokens=%d ms=%.0f", len(request.token_ids), spent_ms)
    return verdict


def _labels(kind: QuestionType, candidates: Sequence[str]) -> tuple[str, ...]:
    """Return the candidates, or refuse those that are no options of a question."""
    if kind is QuestionType.BOOL:
        if candidates and sorted(candidates) != sorted(_STATEMENT):
            problem = "of a bool question are none, or true and false"
            raise InvalidRequestError("candidates", problem)
        return tuple(candidates) or tuple(_STATEMENT)
    if len(candidates) < 2:
        raise InvalidRequestError(
            "candidates", f"holds {len(candidates)} values, at least 2 are due"
        )
    if kind is QuestionType.CHOICE and len(set(candidates)) < len(candidates):
        raise InvalidRequestError("candidates", "holds a value twice")
    return tuple(candidates)


def _request(
    call: ScoreCall,
    kind: QuestionType,
    labels: Sequence[str],
    profile: DecisionProfile,
    model: ServedModel,
) -> DecideRequest:
    hf = model.tokenizer.hf
    require_bounded("prompt", call.prompt, model)
    asked = call.prompt.encode()[: call.stable_prefix_bytes].decode(errors="ignore")
    question = _tokens(f"{_NAMES[kind]} question: {asked}", model)
    options = [[hf.mask_token_id, *_tokens(f" {text}", model)] for text in _texts(kind, labels)]
    _require_room(question, options, profile)
    token_ids, marks = [hf.cls_token_id, *question, hf.sep_token_id], []
    for option in options:
        marks.append(len(token_ids))
        token_ids += option
    token_ids.append(hf.sep_token_id)
    token_ids += _fitting(call.prompt[len(asked) :], len(token_ids) + 1, model)
    return DecideRequest(
        token_ids=(*token_ids, hf.sep_token_id), marks=tuple(marks), question_type=kind
    )


def _tokens(text: str, model: ServedModel) -> list[int]:
    """Return the tokens of a text, in which nothing is a mask or another control token."""
    text = text.replace(str(model.tokenizer.hf.mask_token), " ")
    return model.tokenizer.encode(model.guard.text(text), adds_special=False)


def _texts(kind: QuestionType, labels: Sequence[str]) -> list[str]:
    match kind:
        case QuestionType.CHOICE:
            return list(labels)
        case QuestionType.SCORE:
            return [f"level {i}: {label}" for i, label in enumerate(labels)]
        case QuestionType.BOOL:
            return [_STATEMENT[label] for label in _STATEMENT]


def _require_room(
    question: Sequence[int], options: Sequence[Sequence[int]], profile: DecisionProfile
) -> None:
    for i, option in enumerate(options):
        if len(option) > _OPTION_TOKENS + 1:
            problem = f"takes {len(option) - 1} tokens, at most {_OPTION_TOKENS} are read"
            raise InvalidRequestError(f"candidates[{i}]", problem)
    used = sum(map(len, options))
    room = profile.question_tokens - used
    if room < _LEAST_QUESTION_TOKENS:
        most = profile.question_tokens - _LEAST_QUESTION_TOKENS
        raise InvalidRequestError("candidates", f"take {used} tokens, at most {most} are read")
    if len(question) > room:
        problem = f"its question takes {len(question)} tokens, {room} are left beside candidates"
        raise InvalidRequestError("prompt", problem)


def _fitting(text: str, used: int, model: ServedModel) -> list[int]:
    """Return the tokens of a text, as many as fit if the options say so."""
    limit = model.card.context_length or MAX_TOKEN_IDS
    token_ids, room = _tokens(text, model), limit - used
    if len(token_ids) <= room:
        return token_ids
    if room < 0 or not model.tuning.retrieval.truncate:
        count = used + len(token_ids)
        raise ContextLengthError("prompt", f"{count} tokens do not fit the context of {limit}")
    return token_ids[:room]


def _verdict(
    kind: QuestionType, labels: Sequence[str], profile: DecisionProfile, decision: Decision
) -> Verdict:
    logprobs = _calibrated(decision.logits, profile.temperature(kind, _bucket(len(labels))))
    metadata: dict[str, JsonValue] = {"rl_agent": {"act_probability": decision.act}}
    if kind is QuestionType.BOOL:
        by_label = dict(zip(_STATEMENT, logprobs, strict=True))
        logprobs = [by_label[label] for label in labels]
        answer = _statement(math.exp(by_label["true"]))
    else:
        answer = _answer(kind, labels, logprobs)
        metadata |= _metadata(kind, labels, logprobs)
    scored = zip(labels, logprobs, strict=True)
    return Verdict(
        tuple(ScoredCandidate((ScoredToken(label, logprob),)) for label, logprob in scored),
        {**answer, "metadata": metadata},
    )


def _bucket(options: int) -> str:
    return next(name for most, name in _BUCKETS if options <= most)


def _calibrated(logits: Sequence[float], temperature: float) -> list[float]:
    """Return the log-probabilities of a softmax."""
    scaled = [logit / temperature for logit in logits]
    highest = max(scaled)
    total = math.log(sum(math.exp(each - highest) for each in scaled)) + highest
    return [each - total for each in scaled]


def _statement(probability: float) -> dict[str, JsonValue]:
    rounded = round(probability, _DIGITS)
    return {"type": "bool", "value": rounded >= 0.5, "probability": rounded}


def _answer(
    kind: QuestionType, labels: Sequence[str], logprobs: Sequence[float]
) -> dict[str, JsonValue]:
    probabilities = [math.exp(each) for each in logprobs]
    is_choice = kind is QuestionType.CHOICE
    best = max(range(len(labels)), key=probabilities.__getitem__)
    mean = sum(level * each for level, each in enumerate(probabilities))
    names = labels if is_choice else [str(level) for level in range(len(labels))]
    return {
        "type": kind.value,
        "value": labels[best] if is_choice else round(mean, _DIGITS),
        "probabilities": {
            name: round(each, _DIGITS) for name, each in zip(names, probabilities, strict=True)
        },
    }


def _metadata(
    kind: QuestionType, labels: Sequence[str], logprobs: Sequence[float]
) -> dict[str, JsonValue]:
    """Return how far from equal the probabilities are, 1 at most, and the names of levels."""
    entropy = -sum(math.exp(each) * each for each in logprobs)
    confidence = round(1 - entropy / math.log(len(labels)), _DIGITS)
    if kind is QuestionType.CHOICE:
        return {"confidence": confidence}
    legend = {str(level): label for level, label in enumerate(labels)}
    return {"confidence": confidence, "legend": legend}
