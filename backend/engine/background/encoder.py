"""Runs texts through an encoder, several in a pass: the shorter ones are padded and masked.

The result of a text depends neither on its padding nor on its neighbours.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any, TypeAlias

import mlx.core as mx

from backend.core.classification import ClassifyRequest, Labels, TokenLabel
from backend.core.embedding import Embedding, EmbeddingRequest
from backend.core.scoring import TokenPair
from backend.engine.background.pooling import no_numbers, pooled
from backend.engine.background.text_queue import padded
from backend.errors import GenerationFailedError
from backend.model.checkpoint.upstream import Network

# An object of mlx-vlm, untyped: with hidden states, or with logits.
Output: TypeAlias = Any


class Encoder:
    """One loaded encoder; belongs to the main thread."""

    def __init__(self, network: Network) -> None:
        """Create an encoder, with the padding of the network.

        Args:
            network: An mlx-vlm model that reads whole texts and returns hidden states, or a label.
        """
        self._network = network
        # Any id would do, but RoBERTa counts positions by it.
        self._pad_id = int(getattr(network.config, "pad_token_id", None) or 0)
        self._reads_segments = getattr(network.config, "type_vocab_size", 1) > 1

    def look(self, token_ids: Sequence[int]) -> mx.array:
        """Return the network's output for a text: hidden states, or logits."""
        output = self._run([token_ids], None)
        outputs: mx.array = getattr(output, "logits", None)
        return output.last_hidden_state if outputs is None else outputs

    def embed(
        self, requests: Sequence[EmbeddingRequest]
    ) -> list[Embedding | GenerationFailedError]:
        """Return the embeddings of texts in one pass, or their errors."""
        states = self._run([request.token_ids for request in requests], None).last_hidden_state
        return pooled(requests, states)

    def classify(self, requests: Sequence[ClassifyRequest]) -> list[Labels | GenerationFailedError]:
        """Return the likeliest label of each token of texts in one pass."""
        rows = [request.token_ids for request in requests]
        probabilities = mx.softmax(self._run(rows, None).logits.astype(mx.float32), axis=-1)
        best = mx.argmax(probabilities, axis=-1)
        labels: list[list[int]] = best.tolist()
        highest: list[list[float]] = probabilities.max(axis=-1).tolist()
        return [
            Labels(tuple(map(TokenLabel, labels[i][: len(row)], highest[i][: len(row)])))
            if all(map(isfinite, highest[i][: len(row)]))
            else no_numbers()
            for i, row in enumerate(rows)
        ]

    def score_pairs(self, pairs: Sequence[TokenPair]) -> list[float | GenerationFailedError]:
        """Return the logits of pairs in one pass, or their errors."""
        has_segments = self._reads_segments and all(pair.segment_ids for pair in pairs)
        segments = padded([pair.segment_ids for pair in pairs]) if has_segments else None
        output = self._run([pair.token_ids for pair in pairs], segments)
        logits: list[float] = output.logits[:, 0].astype(mx.float32).tolist()
        return [logit if isfinite(logit) else no_numbers() for logit in logits]

    def _run(self, rows: Sequence[Sequence[int]], segments: mx.array | None) -> Output:
        mask = padded([[1] * len(row) for row in rows])
        ids = padded(rows, self._pad_id)
        return self._network(ids, attention_mask=mask, token_type_ids=segments)
