"""Calls, requests and results of Score and Rerank."""

from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from backend.core.prompt import Prompt
from backend.core.request import ComputeRequest, Remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """A prompt and its possible continuations.

    Attributes:
        stable_prefix_bytes: Bytes of the prompt, in UTF-8, that later calls will share; 0 if
            unknown.
    """

    prompt: str
    candidates: tuple[str, ...]
    stable_prefix_bytes: int = 0


class Scores(Struct, frozen=True, tag=True, array_like=True):
    """The log-probabilities (natural) of each continuation's tokens."""

    logprobs: tuple[tuple[float, ...], ...]


class ScoreRequest(ComputeRequest[Scores], frozen=True, kw_only=True, tag=True, array_like=True):
    """A request for the token log-probabilities of every continuation.

    Attributes:
        prompt: Precedes every continuation; computed once.
        continuations: Each has at least one token; an empty tuple computes only the prompt.
        remembered: Whether the prompt may enter the prompt cache.
    """

    request_id: str
    prompt: Prompt
    continuations: tuple[tuple[int, ...], ...]
    remembered: Remembered = Remembered.ALL


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text and its log-probability (natural) given the tokens before it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate's tokens, at least one."""

    tokens: tuple[ScoredToken, ...]

    @property
    def logprob(self) -> float:
        """Log-probability (natural) of the whole candidate."""
        return sum(token.logprob for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token."""
        return self.logprob / len(self.tokens)


class RerankerKind(Enum):
    """A family of generative rerankers, with its own prompt and answers."""

    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankCall:
    """A query and the documents to order by relevance to it.

    Attributes:
        max_results: `None` means all.
    """

    query: str
    documents: tuple[str, ...]
    max_results: int | None = None


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A query and a document as token ids for a cross-encoder.

    Attributes:
        segment_ids: 0 or 1 per token, for query or document; empty if the tokenizer sets none.
    """

    token_ids: tuple[int, ...]
    segment_ids: tuple[int, ...] = ()


class Judgement(Struct, frozen=True, tag=True, array_like=True):
    """A cross-encoder's logit of each pair."""

    logits: tuple[float, ...]


class JudgeRequest(ComputeRequest[Judgement], frozen=True, tag=True, array_like=True):
    """A request for a cross-encoder's logit of each pair."""

    pairs: tuple[TokenPair, ...]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, its index in the call, and its relevance between 0 and 1."""

    index: int
    text: str
    relevance: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, most relevant first, and the number of tokens read."""

    documents: tuple[RankedDocument, ...]
    prompt_tokens: int
