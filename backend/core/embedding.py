"""What an Embedding asks for and what it gives, as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Pooling(Enum):
    """How the vectors of a text's tokens become one; `NONE` leaves them as they are."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingProfile:
    """What a checkpoint says of its embeddings.

    Attributes:
        is_normalized: Whether a pooled vector has the length 1.
        obstacle: Why they cannot be computed here; empty when they can.
    """

    pooling: Pooling = Pooling.MEAN
    is_normalized: bool = False
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """A call as its sender meant it: a text, or the ids of its tokens where there is none."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """What the engine computes: at least one token id, all in range for the loaded model."""

    token_ids: tuple[int, ...]
    pooling: Pooling
    is_normalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Vectors of float32.

    Attributes:
        values: One vector after the other.
        dim: Numbers in a vector.
        is_pooled: Whether there is one vector for all tokens, not one for each.
        prompt_tokens: Tokens that were read.
    """

    values: Sequence[float]
    dim: int
    is_pooled: bool
    prompt_tokens: int
