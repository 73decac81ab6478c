"""Results of sessions as messages."""

from array import array
from typing import TypeAlias

import msgspec

from backend.core.classification import TokenLabel
from backend.core.embedding import Embedding
from backend.core.prompt_cache import PromptCacheListing
from backend.engine.messages.failure import Failure
from backend.errors import BackendError

Logprobs: TypeAlias = tuple[tuple[float, ...], ...]
Logits: TypeAlias = tuple[float, ...]
Labels: TypeAlias = tuple[TokenLabel, ...]
Result: TypeAlias = Embedding | Logprobs | Logits | Labels | PromptCacheListing


class Vectors(msgspec.Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """An embedding; `values` is float32 in this machine's byte order."""

    values: bytes
    dim: int
    is_pooled: bool
    prompt_tokens: int

    @classmethod
    def of(cls, embedding: Embedding) -> "Vectors":
        """Return an embedding as a message."""
        return cls(
            values=array("f", embedding.values).tobytes(),
            dim=embedding.dim,
            is_pooled=embedding.is_pooled,
            prompt_tokens=embedding.prompt_tokens,
        )

    def unpacked(self) -> Embedding:
        """Return the embedding."""
        return Embedding(
            values=array("f", self.values),
            dim=self.dim,
            is_pooled=self.is_pooled,
            prompt_tokens=self.prompt_tokens,
        )


class Scores(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Log-probabilities, per continuation and token."""

    logprobs: Logprobs

    def unpacked(self) -> Logprobs:
        """Return them."""
        return self.logprobs


class Judgement(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A logit of each pair."""

    logits: Logits

    def unpacked(self) -> Logits:
        """Return them."""
        return self.logits


class Classification(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The label of each token."""

    labels: Labels

    def unpacked(self) -> Labels:
        """Return them."""
        return self.labels


class Listing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The contents of the prompt cache."""

    listing: PromptCacheListing

    def unpacked(self) -> PromptCacheListing:
        """Return them."""
        return self.listing


Packed: TypeAlias = Vectors | Scores | Judgement | Classification | Listing | Failure


def packed(result: object) -> Packed:
    """Return a session's result as a message."""
    match result:
        case BaseException():
            return Failure.of(result)
        case Embedding():
            return Vectors.of(result)
        case PromptCacheListing():
            return Listing(result)
        case tuple() if result and isinstance(result[0], TokenLabel):
            return Classification(result)
        case tuple() if result and isinstance(result[0], float):
            return Judgement(result)
        case tuple():
            return Scores(result)
        case _:
            raise TypeError(f"{type(result).__name__} is no result of a job")


def unpacked(result: Packed) -> Result | BackendError:
    """Return a result for its caller, or the error to raise there."""
    return result.error() if isinstance(result, Failure) else result.unpacked()
