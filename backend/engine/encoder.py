"""Run texts through an encoder, several in a pass: the shorter ones are padded and masked.

What a text gives depends neither on what it is padded with nor on its neighbours.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from backend.core.embedding import Embedding, EmbeddingRequest
from backend.core.scoring import TokenPair
from backend.engine.pooling import pooled
from backend.engine.text_queue import padded
from backend.model.upstream import Network

# An object of mlx-vlm, untyped: with hidden states, or with logits.
Output: TypeAlias = Any


class Encoder:
    """One loaded encoder; belongs to the engine thread."""

    def __init__(self, network: Network) -> None:
        """Prepare.

        Args:
            network: A model of mlx-vlm that reads whole texts: hidden states, or a label.
        """
        self._network = network
        # Any id would do, but RoBERTa counts positions by it.
        self._pad_id = int(getattr(network.config, "pad_token_id", None) or 0)
        self._reads_segments = getattr(network.config, "type_vocab_size", 1) > 1

    def embed(self, requests: Sequence[EmbeddingRequest]) -> list[Embedding]:
        """Return the embeddings of texts in one pass."""
        states = self._run([request.token_ids for request in requests], None).last_hidden_state
        return pooled(requests, states)

    def judge(self, pairs: Sequence[TokenPair]) -> list[float]:
        """Return the logits of pairs in one pass."""
        has_segments = self._reads_segments and all(pair.segment_ids for pair in pairs)
        segments = padded([pair.segment_ids for pair in pairs]) if has_segments else None
        output = self._run([pair.token_ids for pair in pairs], segments)
        logits: list[float] = output.logits[:, 0].astype(mx.float32).tolist()
        return logits

    def _run(self, rows: Sequence[Sequence[int]], segments: mx.array | None) -> Output:
        mask = padded([[1] * len(row) for row in rows])
        ids = padded(rows, self._pad_id)
        return self._network(ids, attention_mask=mask, token_type_ids=segments)
