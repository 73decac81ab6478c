"""The pipeline of Score with a question: how likely each answer is, by a decision model.

Each family writes questions in its own form (`decision_forms`). An encoder reads one in a pass of
its own; of a decoder it is the log-probabilities of the tokens that may come next.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from backend.core.prompt import JsonValue
from backend.core.scoring import (
    DecideRequest,
    QuestionType,
    ScoreCall,
    ScoredCandidate,
    ScoredToken,
    ScoreRequest,
)
from backend.errors import InvalidRequestError
from backend.pipeline import worker_pool
from backend.pipeline.decision_forms import FORMS, STATEMENT, Form, Question, Reading
from backend.pipeline.served_model import (
    ServedEngine,
    ServedModel,
    require_bounded,
    require_decoder,
    require_ids,
    tokenised_as,
)

_DIGITS = 4
# A probability of a candidate that rounding made 0.
_LEAST = 1e-30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The candidates of a call, each as one token, and the answer as mlx-vlm words it."""

    candidates: tuple[ScoredCandidate, ...]
    answer: Mapping[str, JsonValue]


async def decide(call: ScoreCall, model: ServedModel, engine: ServedEngine) -> Verdict:
    """Return the answer to a question about a text; cancel to abandon the work.

    The prompt begins with the question, which is its stable prefix; the rest is the text.
    """
    started = time.monotonic()
    if model.card.decisions is None:
        require_decoder("Score", model)
        problem = "is not served: this model scores candidates as plain text"
        raise InvalidRequestError("question_type", problem)
    if call.question_type is None:
        types = ", ".join(each.value for each in QuestionType)
        raise InvalidRequestError("question_type", f"is empty: this model answers {types}")
    form = FORMS[model.card.model_type]
    require_bounded("prompt", call.prompt, model)
    asked = call.prompt.encode()[: call.stable_prefix_bytes].decode(errors="ignore")
    question = Question(
        kind=call.question_type,
        asked=asked,
        text=call.prompt[len(asked) :],
        labels=_labels(call.question_type, call.candidates, form),
        model=model,
    )
    request = await worker_pool.run(
        partial(_request, form, question),
        size_bytes=len(call.prompt) + sum(map(len, call.candidates)),
    )
    reading = form.read(question, await engine.compute(model, request))
    read = request if isinstance(request, DecideRequest) else request.prompt
    count = len(read.token_ids)
    spent_ms = (time.monotonic() - started) * 1000.0
    log.info("decision prompt_tokens=%d ms=%.0f", count, spent_ms)
    return _verdict(question, form, reading)


def _request(form: Form, question: Question) -> DecideRequest | ScoreRequest:
    with tokenised_as("prompt"):
        request = form.request(question)
    if isinstance(request, DecideRequest):
        require_ids("prompt", request.token_ids, question.model)
    return request


def _labels(kind: QuestionType, candidates: Sequence[str], form: Form) -> tuple[str, ...]:
    """Return the candidates, or refuse those that are no options of a question."""
    if kind is QuestionType.BOOL:
        if candidates and sorted(candidates) != sorted(STATEMENT):
            problem = "of a bool question are none, or true and false"
            raise InvalidRequestError("candidates", problem)
        return tuple(candidates) or STATEMENT
    most = form.most.get(kind, math.inf)
    if not 2 <= (count := len(candidates)) <= most:
        bound = "at least 2 are due" if count < 2 else f"this model reads at most {most}"
        raise InvalidRequestError("candidates", f"holds {count} values, {bound}")
    if kind is QuestionType.CHOICE and len(set(candidates)) < len(candidates):
        raise InvalidRequestError("candidates", "holds a value twice")
    return tuple(candidates)


def _verdict(question: Question, form: Form, reading: Reading) -> Verdict:
    probabilities = reading.probabilities
    if question.kind is QuestionType.BOOL:
        by_label = dict(zip(STATEMENT, probabilities, strict=True))
        probabilities = [by_label[label] for label in question.labels]
        answer = _statement(by_label["true"])
    else:
        answer = _answer(question, form, probabilities)
    metadata = _metadata(question, form, probabilities) | reading.metadata
    scored = zip(question.labels, probabilities, strict=True)
    return Verdict(
        tuple(
            ScoredCandidate((ScoredToken(label, math.log(max(each, _LEAST))),))
            for label, each in scored
        ),
        {**answer, "metadata": metadata} if metadata else answer,
    )


def _statement(probability: float) -> dict[str, JsonValue]:
    rounded = round(probability, _DIGITS)
    return {"type": "bool", "value": rounded >= 0.5, "probability": rounded}


def _answer(question: Question, form: Form, probabilities: Sequence[float]) -> dict[str, JsonValue]:
    labels, is_choice = question.labels, question.kind is QuestionType.CHOICE
    best = max(range(len(labels)), key=probabilities.__getitem__)
    mean = sum(level * each for level, each in enumerate(probabilities))
    names = labels if is_choice else [str(level) for level in range(len(labels))]
    return {
        "type": question.kind.value,
        "value": labels[best] if is_choice else round(mean, form.digits),
        "probabilities": {
            name: round(each, _DIGITS) for name, each in zip(names, probabilities, strict=True)
        },
    }


def _metadata(
    question: Question, form: Form, probabilities: Sequence[float]
) -> dict[str, JsonValue]:
    """Return how sure the model is, as its family measures it, and the names of levels."""
    if question.kind is QuestionType.BOOL:
        return {}
    found: dict[str, JsonValue] = {
        name: round(measure(probabilities), _DIGITS) for name, measure in form.sureness.items()
    }
    if question.kind is QuestionType.SCORE:
        found["legend"] = {str(level): label for level, label in enumerate(question.labels)}
    return found
