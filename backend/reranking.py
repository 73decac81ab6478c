"""The pipeline of Rerank with generative rerankers: how likely is "yes" behind each document?"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from backend.config import TuningOptions
from backend.core.prompt import Prompt
from backend.core.request import Remembered
from backend.core.scoring import (
    RankedDocument,
    Ranking,
    RerankCall,
    RerankerKind,
    ScoreRequest,
)
from backend.errors import UnsupportedError
from backend.intake import SideEngine, loaded, require_fit, require_possible_fit
from backend.model.loaded import LoadedModel
from backend.model.prefix import common_length

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wire:
    """How a family of rerankers is asked; the first answer means that a document is relevant."""

    head: str
    question: str
    tail: str
    answers: tuple[str, str]


# As the model cards of Qwen3-Reranker have it, with the instruction that is their default.
_WIRES = {
    RerankerKind.QWEN3: _Wire(
        head=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n"
        ),
        question=(
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the "
            "query\n<Query>: {query}\n<Document>: {document}"
        ),
        tail="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        answers=("yes", "no"),
    )
}


async def rerank(call: RerankCall, engine: SideEngine) -> Ranking:
    """Return documents in the order of their relevance; cancel to leave.

    Documents run one after another, each a job of its own: other callers have their turn.

    Raises:
        UnsupportedError: The loaded model is no reranker.
        InvalidRequestError: A document does not fit the context.
    """
    started = time.monotonic()
    model, tuning = loaded(engine)
    wire = _WIRES[_kind(model, tuning)]
    answers = _answer_ids(wire, model)
    prompts = await asyncio.to_thread(_prompts, call, wire, model, truncates=tuning.truncate)
    head = min((common_length(*pair) for pair in pairwise(prompts)), default=0)
    if head:
        # Computed first, and stored: what documents follow it are not worth storing.
        await engine.score(_request(prompts[0][:head], (), Remembered.ALL))
    documents = []
    for i, prompt in enumerate(prompts):
        scored = await engine.score(_request(prompt, answers, Remembered.NOTHING))
        documents.append(RankedDocument(i, call.documents[i], _relevance(scored)))
    documents.sort(key=lambda document: document.relevance, reverse=True)
    prompt_tokens = sum(map(len, prompts))
    seconds = time.monotonic() - started
    log.info(
        "rerank documents=%d prompt_tokens=%d ms=%.0f",
        *(len(prompts), prompt_tokens, seconds * 1000.0),
    )
    return Ranking(tuple(documents[: call.max_results]), prompt_tokens)


def _kind(model: LoadedModel, tuning: TuningOptions) -> RerankerKind:
    kind = RerankerKind(tuning.reranker) if tuning.reranker else model.card.reranker
    if kind is None:
        raise UnsupportedError(
            f"Rerank: {model.card.name} is not known as a reranker; if it is one, name its kind "
            "with the option reranker"
        )
    return kind


def _answer_ids(wire: _Wire, model: LoadedModel) -> tuple[tuple[int, ...], ...]:
    ids = [model.tokenizer.encode(text, adds_special=False) for text in wire.answers]
    if any(len(each) != 1 for each in ids):
        raise UnsupportedError(f"Rerank: {' and '.join(wire.answers)} are no tokens of this model")
    return tuple(map(tuple, ids))


def _prompts(
    call: RerankCall, wire: _Wire, model: LoadedModel, *, truncates: bool
) -> list[list[int]]:
    """Return a prompt for each document; head and tail are tokenised by themselves."""
    encode = model.tokenizer.encode
    head, tail = (encode(text, adds_special=False) for text in (wire.head, wire.tail))
    room = (model.card.context_length or math.inf) - len(head) - len(tail)
    prompts = []
    for i, document in enumerate(call.documents):
        field = f"documents[{i}]"
        text = wire.question.format(query=call.query, document=document)
        if not truncates:
            require_possible_fit(field, text, model)
        body = encode(text, adds_special=False)
        if truncates and len(body) > room:
            body = body[: int(room)]
        prompts.append([*head, *body, *tail])
        require_fit(field, prompts[-1], model)
    return prompts


def _request(
    token_ids: Sequence[int], answers: tuple[tuple[int, ...], ...], remembered: Remembered
) -> ScoreRequest:
    return ScoreRequest(
        request_id=uuid.uuid4().hex[:12],
        prompt=Prompt(tuple(token_ids)),
        continuations=answers,
        remembered=remembered,
    )


def _relevance(scored: Sequence[Sequence[float]]) -> float:
    """Return the probability of "yes" among the two answers."""
    (yes,), (no,) = scored
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
