"""Requests for scores, ranks, vectors, labels and transcripts to calls, and results to answers."""

import json
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.config import (
    MAX_CANDIDATES,
    MAX_HINT_CHARS,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_LANGUAGE_CHARS,
    MAX_TOKEN_IDS,
)
from backend.core.scoring import (
    ClassifyCall,
    Embedding,
    EmbeddingCall,
    Entity,
    QuestionType,
    Ranking,
    RerankCall,
    ScoreCall,
    ScoredCandidate,
)
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.pipeline.decisions import Verdict
from backend.pipeline.transcribe import Transcript, TranscriptionCall
from backend.rpc.parsing.checks import (
    Range,
    refuse_mistyped,
    require_at_most,
    require_name,
    require_path,
    require_printable,
    require_range,
)

_EMBEDDINGS = pb.EmbeddingResult.EMBEDDINGS_FIELD_NUMBER
_LENGTH_DELIMITED, _VARINT_BASE = 2, 128
_IDS_PER_SLICE = 2**12
# As some models call a question of yes or no.
_OTHER_NAMES = {"noul": "bool"}


def score_call(request: pb.ScoreRequest) -> ScoreCall:
    """Return the call."""
    question_type = _question_type(request)
    if question_type is not QuestionType.BOOL or request.candidates:
        _require_texts("candidates", request.candidates)
    if question_type is not None and not request.prompt:
        raise InvalidRequestError("prompt", "is empty")
    for i, candidate in enumerate(request.candidates):
        if not candidate:
            raise InvalidRequestError(f"candidates[{i}]", "is empty")
    if request.stable_prefix_len < 0:
        problem = f"must be at least 0, not {request.stable_prefix_len}"
        raise InvalidRequestError("stable_prefix_len", problem)
    return ScoreCall(
        prompt=request.prompt,
        candidates=tuple(request.candidates),
        stable_prefix_bytes=request.stable_prefix_len,
        question_type=question_type,
    )


def _question_type(request: pb.ScoreRequest) -> QuestionType | None:
    refuse_mistyped(request, "question_type")
    name = _OTHER_NAMES.get(request.question_type, request.question_type)
    if not name:
        return None
    if name not in (known := [each.value for each in QuestionType]):
        raise InvalidRequestError("question_type", f"must be one of {', '.join(known)}")
    return QuestionType(name)


def decision_response(verdict: Verdict, request: pb.ScoreRequest) -> pb.ScoreResponse:
    """Return the log-probabilities of the options of a question, and the answer as JSON."""
    return pb.ScoreResponse(
        candidates=[_candidate(each, request) for each in verdict.candidates],
        response_json=json.dumps(verdict.answer, ensure_ascii=False),
    )


def score_pieces(
    candidates: Sequence[ScoredCandidate], request: pb.ScoreRequest
) -> Iterator[bytes]:
    """Yield the candidates' log-probabilities, in the requested detail, as serialised messages.

    One after the other, they are one with the values of all.
    """
    for each in candidates:
        piece = pb.ScoreResponse(candidates=[_candidate(each, request)])
        yield piece.SerializeToString()


def rerank_call(request: pb.RerankRequest) -> RerankCall:
    """Return the call."""
    if not request.query:
        raise InvalidRequestError("query", "is empty")
    _require_texts("documents", request.documents)
    most = require_range("top_n", request.top_n, Range(0)) or None
    documents = tuple(request.documents)
    return RerankCall(query=request.query, documents=documents, max_results=most)


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
    """Return the call; the text wins over ids."""
    for field in _MEDIA_FIELDS:
        if getattr(request, field):
            raise InvalidRequestError(field, "cannot be embedded: Embedding reads text only")
    require_at_most("EmbeddingTokens", request.EmbeddingTokens, MAX_TOKEN_IDS)
    if not request.Embeddings and not request.EmbeddingTokens:
        raise InvalidRequestError("Embeddings", "is empty, and so is EmbeddingTokens")
    return EmbeddingCall(text=request.Embeddings, token_ids=_ids(request.EmbeddingTokens))


def _ids(values: Sequence[int]) -> tuple[int, ...]:
    """Return the values of a repeated field; a million at once would hold the GIL too long."""
    ids: list[int] = []
    for start in range(0, len(values), _IDS_PER_SLICE):
        ids += values[start : start + _IDS_PER_SLICE]
    return tuple(ids)


def embedding_result(embedding: Embedding) -> pb.EmbeddingResult:
    """Return the vectors and their layout."""
    # Millions of floats one by one would take the event loop a third of a second.
    result = pb.EmbeddingResult.FromString(_packed_floats(_EMBEDDINGS, embedding.data))
    result.tokens = len(result.embeddings) // embedding.dim
    result.dim, result.prompt_tokens = embedding.dim, embedding.prompt_tokens
    result.layout = (
        pb.EMBEDDING_LAYOUT_FINAL if embedding.is_pooled else pb.EMBEDDING_LAYOUT_PER_TOKEN
    )
    return result


def _packed_floats(field: int, data: bytes) -> bytes:
    """Return a repeated field of floats as protobuf writes it, from this machine's own floats."""
    if sys.byteorder != "little":
        floats = array("f", data)
        floats.byteswap()
        data = floats.tobytes()
    head, size = bytearray([field << 3 | _LENGTH_DELIMITED]), len(data)
    while size >= _VARINT_BASE:
        head.append(size % _VARINT_BASE + _VARINT_BASE)
        size //= _VARINT_BASE
    head.append(size)
    return bytes(head) + data


def classify_call(request: pb.TokenClassifyRequest) -> ClassifyCall:
    """Return the call of a request."""
    refuse_mistyped(request, "labels")
    require_at_most("labels", request.labels, MAX_LABELS)
    for i, label in enumerate(request.labels):
        require_name(f"labels[{i}]", require_printable(f"labels[{i}]", label, MAX_LABEL_CHARS))
    threshold = require_range("threshold", request.threshold, Range(0, 1))
    return ClassifyCall(request.text, threshold, tuple(dict.fromkeys(request.labels)))


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


_NANOSECONDS = 1_000_000_000


def transcription_call(request: pb.TranscriptRequest) -> TranscriptionCall:
    """Return the call of a request. Speakers and word times are not detected."""
    if not request.dst.strip():
        raise InvalidRequestError("dst", "is empty")
    if not 0.0 <= request.temperature < math.inf:
        raise InvalidRequestError("temperature", f"must be at least 0, not {request.temperature:g}")
    hint = request.prompt.strip()
    if len(hint) > MAX_HINT_CHARS:
        problem = f"has {len(hint)} characters, at most {MAX_HINT_CHARS} are allowed"
        raise InvalidRequestError("prompt", problem)
    return TranscriptionCall(
        path=Path(require_path("dst", request.dst)),
        language=require_printable("language", request.language, MAX_LANGUAGE_CHARS),
        is_translated=request.translate,
        hint=hint,
        temperature=request.temperature,
    )


def transcript_result(transcript: Transcript) -> pb.TranscriptResult:
    """Return the answer."""
    return pb.TranscriptResult(
        segments=[
            pb.TranscriptSegment(
                id=number,
                start=round(segment.start_s * _NANOSECONDS),
                end=round(segment.end_s * _NANOSECONDS),
                text=segment.text,
            )
            for number, segment in enumerate(transcript.segments)
        ],
        text=transcript.text,
        language=transcript.language,
        duration=transcript.duration_s,
    )
