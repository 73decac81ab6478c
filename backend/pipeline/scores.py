"""The pipelines of Embedding, Score and Rerank: passes that generate nothing."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from backend.config import MAX_TOKEN_IDS
from backend.core.model import ModelKind
from backend.core.prompt import Prompt
from backend.core.request import Remembered, new_id
from backend.core.scoring import (
    Embedding,
    EmbeddingCall,
    EmbeddingRequest,
    JudgeRequest,
    Pooling,
    RankedDocument,
    Ranking,
    RerankCall,
    RerankerKind,
    ScoreCall,
    ScoredCandidate,
    ScoredToken,
    ScoreRequest,
    TokenPair,
)
from backend.errors import InvalidRequestError, UnsupportedError
from backend.model.text.guard import unguarded
from backend.model.text.prefix import common_length
from backend.pipeline import worker_pool
from backend.pipeline.served_model import (
    ServedEngine,
    ServedModel,
    require_bounded,
    require_decoder,
    require_fit,
    require_ids,
    require_possible_fit,
    tokenised_as,
)
from common.rpc import require_caller

log = logging.getLogger(__name__)


def _log_end(started: float, text: str, *values: object) -> None:
    log.info("%s ms=%.0f", text % values, (time.monotonic() - started) * 1000.0)


async def embed(call: EmbeddingCall, model: ServedModel, engine: ServedEngine) -> Embedding:
    """Return the vector of a text, or of each token with `pooling:none`."""
    started = time.monotonic()
    options = model.tuning.retrieval
    profile = model.card.embedding
    if profile.obstacle:
        raise UnsupportedError(f"Embedding: {profile.obstacle}")
    token_ids = await worker_pool.run(
        partial(_token_ids, call, model, truncates=options.truncate),
        size_bytes=len(call.text) + worker_pool.BYTES_PER_ID * len(call.token_ids),
    )
    pooling = Pooling(options.pooling) if options.pooling else profile.pooling
    request = EmbeddingRequest(
        token_ids=tuple(token_ids),
        pooling=pooling,
        is_normalized=profile.is_normalized and pooling is not Pooling.NONE,
    )
    embedding = await engine.compute(model, request)
    _log_end(started, "embedding prompt_tokens=%d", len(token_ids))
    return embedding


def _token_ids(call: EmbeddingCall, model: ServedModel, *, truncates: bool) -> list[int]:
    """Return the token ids; a text gets the tokenizer's special tokens."""
    if not call.text:
        require_ids("EmbeddingTokens", call.token_ids, model)
        given = list(call.token_ids)
        if truncates:
            return given[: model.card.context_length]
        require_fit("EmbeddingTokens", given, model)
        return given
    token_ids: Sequence[int]
    with tokenised_as("Embeddings"):
        if truncates:
            token_ids = _truncated(call.text, model)
        else:
            require_possible_fit("Embeddings", call.text, model)
            token_ids = model.tokenizer.encode_packed(call.text, adds_special=True)
    if not token_ids:
        raise InvalidRequestError("Embeddings", "is empty")
    if len(token_ids) > MAX_TOKEN_IDS:
        problem = f"holds {len(token_ids)} tokens, at most {MAX_TOKEN_IDS} are allowed"
        raise InvalidRequestError("Embeddings", problem)
    require_fit("Embeddings", token_ids, model)
    return list(token_ids)


def _truncated(text: str, model: ServedModel) -> list[int]:
    """Return as many tokens of a text as fit, with the special tokens around them."""
    limit = model.card.context_length
    if limit is None:
        require_bounded("Embeddings", text, model)
        return model.tokenizer.encode(text, adds_special=True)
    # Cut text far beyond the limit before tokenising it.
    text = text[: 2 * limit * max(model.tokenizer.longest_piece_bytes, 1)]
    whole = model.tokenizer.encode(text, adds_special=True)
    bare = model.tokenizer.encode(text, adds_special=False)
    excess = len(whole) - limit
    if excess <= 0:
        return whole
    start = _position(bare, whole)
    kept = start + max(len(bare) - excess, 0)
    return whole[:kept] + whole[start + len(bare) :]


def _position(part: list[int], whole: list[int]) -> int:
    """Return the offset of the part in the whole, or the length of the whole."""
    starts = range(len(whole) - len(part) + 1)
    return next((i for i in starts if whole[i : i + len(part)] == part), len(whole))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The request, and the offset of the candidate's own tokens in each continuation."""

    request: ScoreRequest
    starts: tuple[int, ...]


async def score(
    call: ScoreCall, model: ServedModel, engine: ServedEngine
) -> tuple[ScoredCandidate, ...]:
    """Return the candidates' log-probabilities, in call order.

    A candidate is tokenised together with the prompt. Its own tokens begin where the result first
    differs from the prompt's tokens.
    """
    started = time.monotonic()
    require_decoder("Score", model)
    size_bytes = len(call.prompt) * len(call.candidates) + sum(map(len, call.candidates))
    wholes = await worker_pool.run_in_turns(_wholes(call, model), size_bytes=size_bytes)
    plan = await worker_pool.run(partial(_plan, call, wholes, model), size_bytes=size_bytes)
    scored = await engine.compute(model, plan.request)
    request_id, count = plan.request.request_id, len(plan.request.prompt.token_ids)
    text = "score id=%s prompt_tokens=%d candidates=%d"
    _log_end(started, text, request_id, count, len(scored.logprobs))
    found = zip(plan.request.continuations, scored.logprobs, plan.starts, strict=True)
    candidates = (
        _candidate(token_ids[start:], logprobs[start:], model)
        for token_ids, logprobs, start in found
    )
    return tuple(await worker_pool.run_in_turns(candidates, size_bytes=size_bytes))


def _wholes(call: ScoreCall, model: ServedModel) -> Iterator[list[int]]:
    """Yield the token ids of the prompt, and of the prompt with each candidate."""
    fields = [f"candidates[{i}]" for i in range(len(call.candidates))]
    for field, candidate in zip(["prompt", *fields], ["", *call.candidates], strict=True):
        require_caller()
        require_possible_fit(field, call.prompt + candidate, model)
        with tokenised_as(field):
            token_ids = model.tokenizer.encode_prompt(call.prompt + candidate)
        require_fit(field, token_ids, model)
        yield token_ids


def _plan(call: ScoreCall, tokenised: Sequence[list[int]], model: ServedModel) -> _Plan:
    prompt, *wholes = tokenised
    starts = [common_length(prompt, whole) for whole in wholes]
    for i, (start, whole) in enumerate(zip(starts, wholes, strict=True)):
        if start == len(whole):
            raise InvalidRequestError(f"candidates[{i}]", "adds no token to the prompt")
    shared = min(starts)
    if shared == 0:
        problem = "is empty" if not prompt else "shares no token with prompt and candidate"
        raise InvalidRequestError("prompt", problem)
    request = ScoreRequest(
        request_id=new_id(),
        prompt=Prompt(
            tuple(prompt[:shared]),
            boundaries=_boundaries(call, prompt[:shared], model),
            scope=model.own_scope(),
        ),
        continuations=tuple(tuple(whole[shared:]) for whole in wholes),
    )
    return _Plan(request, tuple(start - shared for start in starts))


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


async def rerank(call: RerankCall, model: ServedModel, engine: ServedEngine) -> Ranking:
    """Return the documents sorted by relevance, most relevant first."""
    started = time.monotonic()
    is_judge = model.card.kind is ModelKind.CROSS_ENCODER
    verdict = await (_judge if is_judge else _ask)(call, model, engine)
    documents = [
        RankedDocument(i, text, relevance)
        for i, (text, relevance) in enumerate(zip(call.documents, verdict.relevances, strict=True))
    ]
    documents.sort(key=lambda document: document.relevance, reverse=True)
    text = "rerank documents=%d prompt_tokens=%d"
    _log_end(started, text, len(documents), verdict.prompt_tokens)
    return Ranking(tuple(documents[: call.max_results]), verdict.prompt_tokens)


async def _judge(call: RerankCall, model: ServedModel, engine: ServedEngine) -> _Verdict:
    size_bytes = _size_bytes(call)
    pairs = tuple(await worker_pool.run_in_turns(_pairs(call, model), size_bytes=size_bytes))
    # Computed once, equal documents have equal scores, however passes round.
    distinct = tuple(dict.fromkeys(pairs))
    judgement = await engine.compute(model, JudgeRequest(distinct))
    relevances = dict(zip(distinct, map(_sigmoid, judgement.logits), strict=True))
    return _Verdict(
        [relevances[pair] for pair in pairs], sum(len(pair.token_ids) for pair in pairs)
    )


def _pairs(call: RerankCall, model: ServedModel) -> Iterator[TokenPair]:
    """Yield the query paired with each document, truncated if the options say so."""
    encode = model.tokenizer.encode_pair
    require_bounded("query", call.query, model)
    with tokenised_as("query"):
        require_fit("query", encode(call.query, "")[0], model)
    limit = model.card.context_length if model.tuning.retrieval.truncate else None
    for i, document in enumerate(call.documents):
        require_caller()
        field = f"documents[{i}]"
        require_bounded(field, document, model)
        with tokenised_as(field):
            token_ids, segment_ids = encode(call.query, document, limit=limit)
        require_fit(field, token_ids, model)
        yield TokenPair(tuple(token_ids), tuple(segment_ids))


def _size_bytes(call: RerankCall) -> int:
    return sum(map(len, call.documents)) + len(call.query) * len(call.documents)


async def _ask(call: RerankCall, model: ServedModel, engine: ServedEngine) -> _Verdict:
    """Ask a generative reranker about one document at a time, so that other work gets its turn."""
    require_decoder("Rerank", model)
    phrasing = _PHRASINGS[_kind(model)]
    answers = _answer_ids(phrasing, model)
    scope = model.own_scope()
    prompts = await worker_pool.run_in_turns(
        _prompts(call, phrasing, model), size_bytes=_size_bytes(call)
    )
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    head = min((common_length(*pair) for pair in pairwise(distinct)), default=0)
    if head:
        # Compute and store the shared prefix first; the documents are not worth storing.
        await engine.compute(model, _request(distinct[0][:head], (), Remembered.ALL, scope))
    relevances = {}
    for prompt in distinct:
        request = _request(prompt, answers, Remembered.NOTHING, scope)
        (yes,), (no,) = (await engine.compute(model, request)).logprobs
        relevances[prompt] = _sigmoid(yes - no)
    return _Verdict([relevances[tuple(prompt)] for prompt in prompts], sum(map(len, prompts)))


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


def _prompts(call: RerankCall, phrasing: _Phrasing, model: ServedModel) -> Iterator[list[int]]:
    """Yield a prompt for each document; its parts are tokenised separately."""
    encode = model.tokenizer.encode
    head, tail = (encode(text, adds_special=False) for text in (phrasing.head, phrasing.tail))
    require_possible_fit("query", call.query, model)
    query = model.guard.text(call.query)
    with tokenised_as("query"):
        question = encode(phrasing.question.format(query=query, document=""), adds_special=False)
    require_fit("query", [*head, *question, *tail], model)
    room = (model.card.context_length or math.inf) - len(head) - len(tail)
    truncates = model.tuning.retrieval.truncate
    for i, document in enumerate(call.documents):
        field = f"documents[{i}]"
        require_caller()
        text = phrasing.question.format(query=query, document=model.guard.text(document))
        require_bounded(field, unguarded(text), model)
        if not truncates:
            require_possible_fit(field, unguarded(text), model)
        with tokenised_as(field):
            body = encode(text, adds_special=False)
        if truncates and len(body) > room:
            body = body[: int(room)]
        prompt = [*head, *body, *tail]
        require_fit(field, prompt, model)
        yield prompt


def _request(
    token_ids: Sequence[int],
    answers: tuple[tuple[int, ...], ...],
    remembered: Remembered,
    scope: str,
) -> ScoreRequest:
    return ScoreRequest(
        request_id=new_id(),
        prompt=Prompt(tuple(token_ids), scope=scope),
        continuations=answers,
        remembered=remembered,
    )


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(min(-logit, 700.0)))
