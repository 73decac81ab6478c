"""The values of Score and Rerank: calls, requests and results."""

from dataclasses import dataclass
from enum import Enum

from backend.core.compute import ComputeRequest
from backend.core.prompt import Prompt
from backend.core.request import Remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """A prompt and the texts that may follow it.

    Attributes:
        stable_prefix_bytes: Bytes of the prompt, in UTF-8, that later calls will share; 0 if
            unknown.
    """

    prompt: str
    candidates: tuple[str, ...]
    stable_prefix_bytes: int = 0


class ScoreRequest(
    ComputeRequest[tuple[tuple[float, ...], ...]],
    frozen=True,
    kw_only=True,
    tag=True,
    array_like=True,
):
    """A request for the log-probabilities of the tokens of every continuation.

    Attributes:
        prompt: Precedes all continuations; computed once.
        continuations: Each of at least one token; none at all computes the prompt only.
        remembered: Whether the prompt may enter the prompt cache.
    """

    request_id: str
    prompt: Prompt
    continuations: tuple[tuple[int, ...], ...]
    remembered: Remembered = Remembered.ALL


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text and its natural-log probability given the tokens before it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate's tokens, at least one."""

    tokens: tuple[ScoredToken, ...]

    @property
    def logprob(self) -> float:
        """Natural-log probability of the whole candidate."""
        return sum(token.logprob for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        """The same per token."""
        return self.logprob / len(self.tokens)


class RerankerKind(Enum):
    """A family of generative rerankers, with its prompt and its answers."""

    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankCall:
    """A query and the documents to order by relevance to it.

    Attributes:
        max_results: `None` is all.
    """

    query: str
    documents: tuple[str, ...]
    max_results: int | None = None


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A query and a document as a cross-encoder reads them.

    Attributes:
        segment_ids: 0 or 1 for each token, query or document; empty when the tokenizer does not
            tell.
    """

    token_ids: tuple[int, ...]
    segment_ids: tuple[int, ...] = ()


class JudgeRequest(ComputeRequest[tuple[float, ...]], frozen=True, tag=True, array_like=True):
    """A request for a cross-encoder's logit of each pair."""

    pairs: tuple[TokenPair, ...]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, its index in the call, and its relevance from 0 to 1."""

    index: int
    text: str
    relevance: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, most relevant first, and the number of tokens read."""

    documents: tuple[RankedDocument, ...]
    prompt_tokens: int
