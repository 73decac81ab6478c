"""Calls, requests and results of Embedding."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from backend.core.request import ComputeRequest


class Pooling(Enum):
    """How token vectors become one vector; `NONE` keeps them all."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingProfile:
    """How a checkpoint computes embeddings, according to its own files.

    Attributes:
        is_normalized: Whether a pooled vector has length 1.
        obstacle: Why they cannot be computed; empty when they can.
    """

    pooling: Pooling = Pooling.MEAN
    is_normalized: bool = False
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """A parsed call: a text, or token ids where there is none."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class Embedding(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """Vectors of float32.

    Attributes:
        data: The vectors, concatenated, in this machine's byte order.
        dim: Length of a vector.
        is_pooled: Whether there is one vector for all tokens rather than one per token.
        prompt_tokens: Number of tokens read.
    """

    data: bytes
    dim: int
    is_pooled: bool
    prompt_tokens: int

    @property
    def values(self) -> Sequence[float]:
        """The vectors, concatenated."""
        return array("f", self.data)


class EmbeddingRequest(
    ComputeRequest[Embedding], frozen=True, kw_only=True, tag=True, array_like=True
):
    """A call in the engine's terms: at least one token id, all within the vocabulary."""

    token_ids: tuple[int, ...]
    pooling: Pooling
    is_normalized: bool
