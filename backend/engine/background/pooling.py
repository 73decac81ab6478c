"""Pools the hidden states of a text, keeping only the parts that its pooling needs."""

from array import array
from collections.abc import Sequence
from typing import assert_never

import mlx.core as mx
import numpy as np

from backend.config import MESSAGE_LIMIT_BYTES
from backend.core.embedding import Embedding, EmbeddingRequest, Pooling
from backend.errors import GenerationFailedError, InvalidRequestError

FLOAT_BYTES = 4


class Pool:
    """The vectors of one text, gathered as its tokens are computed; belongs to the main thread.

    Attributes:
        vector: The pooled vector so far, lazy; `None` when nothing is pooled.
    """

    def __init__(self, request: EmbeddingRequest) -> None:
        """Create an empty pool.

        Args:
            request: The request whose tokens will be added.
        """
        self.vector: mx.array | None = None
        self._request = request
        self._values = array("f")
        self._dim = 0

    def add(self, states: mx.array) -> None:
        """Add the hidden states [T, D] of the next tokens; computes them if none are pooled."""
        states = states.astype(mx.float32)
        self._dim = states.shape[-1]
        match self._request.pooling:
            case Pooling.MEAN:
                total = states.sum(axis=0)
                self.vector = total if self.vector is None else self.vector + total
            case Pooling.LAST:
                self.vector = states[-1]
            case Pooling.CLS:
                self.vector = states[0] if self.vector is None else self.vector
            case Pooling.NONE:
                self._append(states)
            case _:
                assert_never(self._request.pooling)

    def finish(self) -> None:
        """Finish the requested vector, lazily, after the last tokens."""
        if self.vector is None:
            return
        if self._request.pooling is Pooling.MEAN:
            self.vector = self.vector / len(self._request.token_ids)
        if self._request.is_normalized:
            # As in torch: a vector of zeros stays one.
            self.vector = self.vector / mx.maximum(mx.linalg.norm(self.vector), 1e-12)

    def embedding(self) -> Embedding | GenerationFailedError:
        """Return the vectors, after `finish`, or an error if they are not finite.

        Raises:
            InvalidRequestError: They exceed the size of a message.
        """
        if self.vector is not None:
            self._append(self.vector)
        if not np.isfinite(np.frombuffer(self._values, np.float32)).all():
            return no_numbers()
        return Embedding(
            data=self._values.tobytes(),
            dim=self._dim,
            is_pooled=self._request.pooling is not Pooling.NONE,
            prompt_tokens=len(self._request.token_ids),
        )

    def _append(self, states: mx.array) -> None:
        self._require_room()
        self._values.frombytes(memoryview(mx.contiguous(states)).cast("B"))

    def _require_room(self) -> None:
        count = 1 if self.vector is not None else len(self._request.token_ids)
        if count * self._dim * FLOAT_BYTES >= MESSAGE_LIMIT_BYTES:
            raise InvalidRequestError(
                "Embeddings",
                f"{count} vectors of {self._dim} numbers are more than a message of "
                f"{MESSAGE_LIMIT_BYTES} bytes holds; pool them, or send less text",
            )


def pooled(
    requests: Sequence[EmbeddingRequest], states: mx.array
) -> list[Embedding | GenerationFailedError]:
    """Return the embeddings of texts from the hidden states [B, T, D] of all of them.

    A text with NaN or infinity gives an error; its neighbours are not affected.

    Args:
        requests: One row each, which may be longer than the text.
        states: Lazy; computed here and pooled at once.
    """
    pools = [Pool(request) for request in requests]
    for pool, row, request in zip(pools, states, requests, strict=True):
        pool.add(row[: len(request.token_ids)])
        pool.finish()
    mx.eval([pool.vector for pool in pools])
    return [pool.embedding() for pool in pools]


def no_numbers() -> GenerationFailedError:
    """Return the error of a text for which the model computes NaN or infinity."""
    return GenerationFailedError("the model computes NaN or infinity for this text")
