"""The pipeline of Rerank: sorts documents by relevance to a query.

A cross-encoder has a relevance label; a generative reranker answers yes or no.
"""

import logging
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
from backend.model.text.guard import unguarded
from backend.model.text.prefix import common_length
from backend.pipeline import worker_pool
from backend.pipeline.served_model import ComputeEngine, ServedModel
from backend.pipeline.validation import (
    require_bounded,
    require_decoder,
    require_fit,
    require_possible_fit,
)
from common.rpc import require_caller

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Phrasing:
    """The question for a family of rerankers; the first answer means relevant."""

    head: str
    question: str
    tail: str
    answers: tuple[str, str]


# From the Qwen3-Reranker model cards, with their default instruction.
_PHRASINGS = {
    RerankerKind.QWEN3: _Phrasing(
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
    """The relevance of each document, in call order, and the number of tokens read."""

    relevances: Sequence[float]
    prompt_tokens: int


async def rerank(call: RerankCall, model: ServedModel, engine: ComputeEngine) -> Ranking:
    """Return the documents sorted by relevance, most relevant first.

    Raises:
        RequestCancelledError: Another model has replaced this one.
        UnsupportedError: The model is not a reranker.
        InvalidRequestError: A document does not fit the context.
    """
    started = time.monotonic()
    is_judge = model.card.kind is ModelKind.CROSS_ENCODER
    verdict = await (_judge if is_judge else _ask)(call, model, engine)
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


async def _judge(call: RerankCall, model: ServedModel, engine: ComputeEngine) -> _Verdict:
    """Score all documents with a cross-encoder."""
    pairs = await worker_pool.run(lambda: _pairs(call, model), size_bytes=_size_bytes(call))
    judgement = await engine.compute(model, JudgeRequest(pairs))
    relevances = list(map(_sigmoid, judgement.logits))
    return _Verdict(relevances, sum(len(pair.token_ids) for pair in pairs))


def _pairs(call: RerankCall, model: ServedModel) -> tuple[TokenPair, ...]:
    """Return the query paired with each document, truncated if the options say so."""
    encode = model.tokenizer.encode_pair
    require_bounded("query", call.query, model)
    require_fit("query", encode(call.query, "")[0], model)
    limit = model.card.context_length if model.tuning.retrieval.truncate else None
    pairs = []
    for i, document in enumerate(call.documents):
        require_caller()
        require_bounded(f"documents[{i}]", document, model)
        token_ids, segment_ids = encode(call.query, document, limit=limit)
        require_fit(f"documents[{i}]", token_ids, model)
        pairs.append(TokenPair(tuple(token_ids), tuple(segment_ids)))
    return tuple(pairs)


def _size_bytes(call: RerankCall) -> int:
    return sum(map(len, call.documents)) + len(call.query) * len(call.documents)


async def _ask(call: RerankCall, model: ServedModel, engine: ComputeEngine) -> _Verdict:
    """Ask a generative reranker about one document at a time, so that other work gets its turn."""
    require_decoder("Rerank", model)
    phrasing = _PHRASINGS[_kind(model)]
    answers = _answer_ids(phrasing, model)
    scope = model.own_scope()
    prompts = await worker_pool.run(
        lambda: _prompts(call, phrasing, model), size_bytes=_size_bytes(call)
    )
    head = min((common_length(*pair) for pair in pairwise(prompts)), default=0)
    if head:
        # Compute and store the shared prefix first; the documents are not worth storing.
        await engine.compute(model, _request(prompts[0][:head], (), Remembered.ALL, scope))
    relevances = []
    for prompt in prompts:
        request = _request(prompt, answers, Remembered.NOTHING, scope)
        (yes,), (no,) = (await engine.compute(model, request)).logprobs
        relevances.append(_sigmoid(yes - no))
    return _Verdict(relevances, sum(map(len, prompts)))


def _kind(model: ServedModel) -> RerankerKind:
    named = model.tuning.retrieval.reranker
    kind = RerankerKind(named) if named else model.card.reranker
    if kind is None:
        raise UnsupportedError(
            f"Rerank: {model.card.name} is not known as a reranker; if it is one, name its kind "
            "with the option reranker"
        )
    return kind


def _answer_ids(phrasing: _Phrasing, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    ids = [model.tokenizer.encode(text, adds_special=False) for text in phrasing.answers]
    if any(len(each) != 1 for each in ids):
        raise UnsupportedError(
            f"Rerank: {' and '.join(phrasing.answers)} are not single tokens of this model"
        )
    return tuple(map(tuple, ids))


def _prompts(call: RerankCall, phrasing: _Phrasing, model: ServedModel) -> list[list[int]]:
    """Return a prompt for each document; its parts are tokenised separately."""
    encode = model.tokenizer.encode
    head, tail = (encode(text, adds_special=False) for text in (phrasing.head, phrasing.tail))
    require_possible_fit("query", call.query, model)
    query = model.guard.text(call.query)
    question = encode(phrasing.question.format(query=query, document=""), adds_special=False)
    require_fit("query", [*head, *question, *tail], model)
    room = (model.card.context_length or math.inf) - len(head) - len(tail)
    truncates, prompts = model.tuning.retrieval.truncate, []
    for i, document in enumerate(call.documents):
        field = f"documents[{i}]"
        require_caller()
        text = phrasing.question.format(query=query, document=model.guard.text(document))
        require_bounded(field, unguarded(text), model)
        if not truncates:
            require_possible_fit(field, unguarded(text), model)
        body = encode(text, adds_special=False)
        if truncates and len(body) > room:
            body = body[: int(room)]
        prompts.append([*head, *body, *tail])
        require_fit(field, prompts[-1], model)
    return prompts


def _request(
    token_ids: Sequence[int],
    answers: tuple[tuple[int, ...], ...],
    remembered: Remembered,
    scope: str,
) -> ScoreRequest:
    return ScoreRequest(
        request_id=uuid.uuid4().hex[:12],
        prompt=Prompt(tuple(token_ids), scope=scope),
        continuations=answers,
        remembered=remembered,
    )


def _sigmoid(logit: float) -> float:
    """Return the probability of a logit: of yes against no, or of a single label."""
    return 1.0 / (1.0 + math.exp(min(-logit, 700.0)))
