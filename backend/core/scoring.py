"""What a Score and a Rerank ask for and what they give, as plain values."""

from dataclasses import dataclass
from enum import Enum

from backend.core.prompt import Prompt
from backend.core.request import Remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """A prompt and the texts that may follow it.

    Attributes:
        stable_prefix_bytes: How much of the prompt, in UTF-8, later calls will share; 0 when
            nothing is known of them.
    """

    prompt: str
    candidates: tuple[str, ...]
    stable_prefix_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What the engine computes: log-probabilities of the tokens of every continuation.

    Attributes:
        prompt: What all continuations follow; computed once.
        continuations: Each of at least one token; none at all computes the prompt only.
        remembered: Whether the prompt may be put into the prompt cache.
    """

    request_id: str
    prompt: Prompt
    continuations: tuple[tuple[int, ...], ...]
    remembered: Remembered = Remembered.ALL


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text and its natural-log probability after all that precedes it."""

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
    """A family of generative rerankers: what they read, and with which tokens they answer."""

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
        segment_ids: For each token, which of the two it belongs to; empty when the model's
            tokenizer does not say.
    """

    token_ids: tuple[int, ...]
    segment_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """What a cross-encoder computes: a logit for each pair."""

    pairs: tuple[TokenPair, ...]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, by its place in the call, and how relevant it is, from 0 to 1."""

    index: int
    text: str
    relevance: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, the most relevant first, and how many tokens were read for all of them."""

    documents: tuple[RankedDocument, ...]
    prompt_tokens: int
