"""The pipeline of Rerank: documents in the order of their relevance to a query.

A cross-encoder has a label for it; a generative reranker is asked, and answers yes or no.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from backend.config import TuningOptions
from backend.core.model import ModelKind
from backend.core.prompt import Prompt
from backend.core.request import Remembered
from backend.core.scoring import (
    JudgeRequest,
    RankedDocument,
    Ranking,
    RerankCall,
    RerankerKind,
    ScoreRequest,
    TokenPair,
)
from backend.errors import UnsupportedError
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


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How relevant each document is, in their order, and what was read for all of them."""

    relevances: Sequence[float]
    prompt_tokens: int


async def rerank(call: RerankCall, engine: SideEngine) -> Ranking:
    """Return documents in the order of their relevance; cancel to leave.

    Raises:
        RequestCancelledError: Another model was loaded before the engine had all documents.
        UnsupportedError: The loaded model is no reranker.
        InvalidRequestError: A document does not fit the context.
    """
    started = time.monotonic()
    model, tuning = loaded(engine)
    is_judge = model.card.kind is ModelKind.CROSS_ENCODER
    verdict = await (_judge if is_judge else _ask)(call, engine, model, tuning)
    documents = [
        RankedDocument(i, text, relevance)
        for i, (text, relevance) in enumerate(zip(call.documents, verdict.relevances, strict=True))
    ]
    documents.sort(key=lambda document: document.relevance, reverse=True)
    seconds = time.monotonic() - started
    log.info(
        "rerank documents=%d prompt_tokens=%d ms=%.0f",
        *(len(documents), verdict.prompt_tokens, seconds * 1000.0),
    )
    return Ranking(tuple(documents[: call.max_results]), verdict.prompt_tokens)


async def _judge(
    call: RerankCall, engine: SideEngine, model: LoadedModel, tuning: TuningOptions
) -> _Verdict:
    """Give all documents to a cross-encoder; its logit becomes a probability."""
    pairs = await asyncio.to_thread(_pairs, call, model, truncates=tuning.truncate)
    require_same(model, engine.model)
    logits = await engine.judge(JudgeRequest(pairs))
    return _Verdict(list(map(_sigmoid, logits)), sum(len(pair.token_ids) for pair in pairs))


def _pairs(call: RerankCall, model: LoadedModel, *, truncates: bool) -> tuple[TokenPair, ...]:
    """Return the query with each document; a document that is too long may lose its end."""
    encode = model.tokenizer.encode_pair
    require_fit("query", encode(call.query, "")[0], model)
    limit = model.card.context_length if truncates else None
    pairs = []
    for i, document in enumerate(call.documents):
        token_ids, segment_ids = encode(call.query, document, limit=limit)
        require_fit(f"documents[{i}]", token_ids, model)
        pairs.append(TokenPair(tuple(token_ids), tuple(segment_ids)))
    return tuple(pairs)


async def _ask(
    call: RerankCall, engine: SideEngine, model: LoadedModel, tuning: TuningOptions
) -> _Verdict:
    """Ask a generative reranker; documents run one after another: others have their turn."""
    require_decoder("Rerank", model)
    wire = _WIRES[_kind(model, tuning)]
    answers = _answer_ids(wire, model)
    prompts = await asyncio.to_thread(_prompts, call, wire, model, truncates=tuning.truncate)
    head = min((common_length(*pair) for pair in pairwise(prompts)), default=0)
    if head:
        # Computed first, and stored: what documents follow it are not worth storing.
        require_same(model, engine.model)
        await engine.score(_request(prompts[0][:head], (), Remembered.ALL))
    relevances = []
    for prompt in prompts:
        require_same(model, engine.model)
        (yes,), (no,) = await engine.score(_request(prompt, answers, Remembered.NOTHING))
        relevances.append(_sigmoid(yes - no))
    return _Verdict(relevances, sum(map(len, prompts)))


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
    require_possible_fit("query", call.query, model)
    question = encode(wire.question.format(query=call.query, document=""), adds_special=False)
    require_fit("query", [*head, *question, *tail], model)
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


def _sigmoid(logit: float) -> float:
    """Return the probability behind a logit: of yes against no, or of the one label."""
    return 1.0 / (1.0 + math.exp(min(-logit, 700.0)))
