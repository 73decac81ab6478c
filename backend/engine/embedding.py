"""Compute embeddings: a text through the decoder in chunks, its hidden states pooled on the way.

Texts run one at a time, so that the vector of a text does not depend on its neighbours.
"""

from array import array
from collections.abc import Generator
from typing import assert_never

import mlx.core as mx

from backend.config import MESSAGE_LIMIT_BYTES
from backend.core.embedding import Embedding, EmbeddingRequest, Pooling
from backend.engine.network import FreshCaches, Network
from backend.engine.side_jobs import ChunkSize
from backend.errors import InvalidRequestError

FLOAT_BYTES = 4


def embed(
    request: EmbeddingRequest, decoder: Network, fresh_caches: FreshCaches, chunk_size: ChunkSize
) -> Generator[None, None, Embedding]:
    """Return the embedding of a text; yields between forward passes.

    Args:
        request: What to compute.
        decoder: Gives hidden states.
        fresh_caches: Makes its caches.
        chunk_size: Says how much of the text the next pass takes.

    Raises:
        InvalidRequestError: The vectors of all tokens are more than a message holds.
    """
    caches = fresh_caches()
    token_ids, pooled = request.token_ids, _Pool(request)
    fed = 0
    while fed < len(token_ids):
        if fed:
            yield
        count = chunk_size(len(token_ids) - fed)
        chunk = mx.array([token_ids[fed : fed + count]])
        pooled.add(decoder(chunk, cache=caches)[0].astype(mx.float32))
        mx.eval([cache.state for cache in caches])
        fed += count
    return pooled.embedding()


class _Pool:
    """What is left of the hidden states that were seen: no more than the pooling needs."""

    def __init__(self, request: EmbeddingRequest) -> None:
        self._request = request
        self._vector: mx.array | None = None
        self._values = array("f")
        self._dim = 0

    def add(self, states: mx.array) -> None:
        """Take the hidden states [T, D] of the next tokens, and compute them."""
        self._dim = states.shape[-1]
        match self._request.pooling:
            case Pooling.MEAN:
                total = states.sum(axis=0)
                self._keep(total if self._vector is None else self._vector + total)
            case Pooling.LAST:
                self._keep(states[-1])
            case Pooling.CLS:
                self._keep(states[0] if self._vector is None else self._vector)
            case Pooling.NONE:
                self._append(states)
            case _:
                assert_never(self._request.pooling)

    def embedding(self) -> Embedding:
        """Return the vectors of all that was added."""
        if self._vector is not None:
            self._append(self._finished(self._vector))
        return Embedding(
            values=self._values,
            dim=self._dim,
            is_pooled=self._request.pooling is not Pooling.NONE,
            prompt_tokens=len(self._request.token_ids),
        )

    def _keep(self, vector: mx.array) -> None:
        mx.eval(vector)
        self._vector = vector

    def _append(self, states: mx.array) -> None:
        self._require_room()
        self._values.frombytes(memoryview(mx.contiguous(states)).cast("B"))

    def _finished(self, vector: mx.array) -> mx.array:
        if self._request.pooling is Pooling.MEAN:
            vector = vector / len(self._request.token_ids)
        if self._request.is_normalized:
            # As torch does it: a vector of zeros stays one.
            vector = vector / mx.maximum(mx.linalg.norm(vector), 1e-12)
        return vector

    def _require_room(self) -> None:
        count = 1 if self._vector is not None else len(self._request.token_ids)
        if count * self._dim * FLOAT_BYTES >= MESSAGE_LIMIT_BYTES:
            raise InvalidRequestError(
                "Embeddings",
                f"{count} vectors of {self._dim} numbers are more than a message of "
                f"{MESSAGE_LIMIT_BYTES} bytes holds; pool them, or send less text",
            )
