"""Score, Rerank, Embedding and TokenClassify: requests to calls, results to responses."""

from collections.abc import Sequence

from backend.config import MAX_CANDIDATES, MAX_TOKEN_IDS
from backend.core.classification import ClassifyCall, Entity
from backend.core.embedding import Embedding, EmbeddingCall
from backend.core.scoring import Ranking, RerankCall, ScoreCall, ScoredCandidate
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.limits import refuse_unserved, require_at_most


def score_call(request: pb.ScoreRequest) -> ScoreCall:
    """Return the call.

    Raises:
        InvalidRequestError: There are no candidates, too many, or one of them is empty, or the
            request is a question of a typed kind.
    """
    refuse_unserved(request, "question_type", "is not served: candidates are scored as plain text")
    _require_texts("candidates", request.candidates)
    for i, candidate in enumerate(request.candidates):
        if not candidate:
            raise InvalidRequestError(f"candidates[{i}]", "is empty")
    return ScoreCall(
        prompt=request.prompt,
        candidates=tuple(request.candidates),
        stable_prefix_bytes=max(request.stable_prefix_len, 0),
    )


def score_response(
    candidates: Sequence[ScoredCandidate], request: pb.ScoreRequest
) -> pb.ScoreResponse:
    """Return the candidates' log-probabilities, in the requested detail."""
    return pb.ScoreResponse(candidates=[_candidate(each, request) for each in candidates])


def rerank_call(request: pb.RerankRequest) -> RerankCall:
    """Return the call.

    Raises:
        InvalidRequestError: The query or the documents are missing, or `top_n` is negative.
    """
    if not request.query:
        raise InvalidRequestError("query", "is empty")
    _require_texts("documents", request.documents)
    if request.top_n < 0:
        raise InvalidRequestError("top_n", f"is negative: {request.top_n}")
    return RerankCall(
        query=request.query, documents=tuple(request.documents), max_results=request.top_n or None
    )


def rerank_result(ranking: Ranking) -> pb.RerankResult:
    """Return the documents in their new order."""
    tokens = ranking.prompt_tokens
    return pb.RerankResult(
        usage=pb.Usage(total_tokens=tokens, prompt_tokens=tokens),
        results=[
            pb.DocumentResult(index=each.index, text=each.text, relevance_score=each.relevance)
            for each in ranking.documents
        ],
    )


def _require_texts(field: str, texts: Sequence[str]) -> None:
    if not texts:
        raise InvalidRequestError(field, "is empty")
    require_at_most(field, texts, MAX_CANDIDATES)


def _candidate(candidate: ScoredCandidate, request: pb.ScoreRequest) -> pb.CandidateScore:
    tokens = candidate.tokens if request.include_token_logprobs else ()
    return pb.CandidateScore(
        log_prob=candidate.logprob,
        length_normalized_log_prob=candidate.mean_logprob if request.length_normalize else 0.0,
        tokens=[pb.TokenLogProb(token=each.text, log_prob=each.logprob) for each in tokens],
        num_tokens=len(candidate.tokens),
    )


_MEDIA_FIELDS = ("Images", "Audios", "Videos")


def embedding_call(request: pb.PredictOptions) -> EmbeddingCall:
    """Return the call; the text wins over ids.

    Raises:
        InvalidRequestError: Neither is given, there are too many ids, or there are media.
    """
    for field in _MEDIA_FIELDS:
        if getattr(request, field):
            raise InvalidRequestError(field, "cannot be embedded: Embedding reads text only")
    require_at_most("EmbeddingTokens", request.EmbeddingTokens, MAX_TOKEN_IDS)
    if not request.Embeddings and not request.EmbeddingTokens:
        raise InvalidRequestError("Embeddings", "is empty, and so is EmbeddingTokens")
    return EmbeddingCall(text=request.Embeddings, token_ids=tuple(request.EmbeddingTokens))


def embedding_result(embedding: Embedding) -> pb.EmbeddingResult:
    """Return the vectors and their layout."""
    layout = pb.EMBEDDING_LAYOUT_FINAL if embedding.is_pooled else pb.EMBEDDING_LAYOUT_PER_TOKEN
    return pb.EmbeddingResult(
        embeddings=embedding.values,
        tokens=len(embedding.values) // embedding.dim,
        dim=embedding.dim,
        prompt_tokens=embedding.prompt_tokens,
        layout=layout,
    )


def classify_call(request: pb.TokenClassifyRequest) -> ClassifyCall:
    """Return the call of a request.

    Raises:
        InvalidRequestError: The threshold is not a probability, or the request asks for labels of
            its own.
    """
    refuse_unserved(request, "labels", "is not served: a model has the labels it was trained with")
    if not 0.0 <= request.threshold <= 1.0:
        problem = f"must be between 0 and 1, not {request.threshold:g}"
        raise InvalidRequestError("threshold", problem)
    return ClassifyCall(request.text, request.threshold)


def classify_response(entities: Sequence[Entity]) -> pb.TokenClassifyResponse:
    """Return the answer."""
    return pb.TokenClassifyResponse(
        entities=[
            pb.TokenClassifyEntity(
                entity_group=entity.group,
                start=entity.start,
                end=entity.end,
                score=entity.probability,
                text=entity.text,
            )
            for entity in entities
        ]
    )
