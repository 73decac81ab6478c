"""The rows of a batch as a head reads them: each token with the hidden state before it."""

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.drafts.costs import PassCosts
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.draft_batch import DraftBatch
from backend.engine.rows.row import Row
from backend.engine.rows.row_states import RowStates, padded
from backend.model.heads.network import HeadNetwork
from backend.model.heads.tap import HiddenTap

# Nothing that is worth its time: the state before its latest token is not known.
_UNREADABLE = 2**30


class HeadBatch(DraftBatch):
    """The `DraftModel` that reads the states of the model; belongs to the main thread.

    It reads a row from the first token on whose state before it is known: that of a prompt that
    came from the prompt cache is not.
    """

    def __init__(
        self,
        head: HeadNetwork,
        tap: HiddenTap,
        fresh_caches: CacheFactory,
        costs: PassCosts,
        *,
        vocab_size: int,
    ) -> None:
        """Start without rows; the tap is on the model, all else as for a `DraftBatch`."""
        sizes = {"own_vocab_size": vocab_size, "vocab_size": vocab_size}
        super().__init__(head, fresh_caches, costs, **sizes)
        self._head = head
        self._tap = tap
        # States [B, 1, D] of the head after the latest token of each row.
        self._own = mx.zeros((0, 1, 0))

    def see(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Take the states of the pass of the model that was dispatched last.

        Args:
            rows: Of the pass, with what they keep of it.
            counts: How many tokens of the pass each keeps.
        """
        layers = self._tap.take()
        if not layers:
            return
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count and row.request.may_speculate:
                row.states = row.states or RowStates()
                row.states.add(layers, place, count, row.fed)

    def unread(self, row: Row) -> int:
        """Return how many tokens of a row it lacks, but for the latest."""
        if row.states is None or row.states.stop < len(row.token_ids) - 1:
            return _UNREADABLE
        return super().unread(row)

    def _first(self, row: Row) -> int:
        return max(super()._first(row), row.states.first + 1 if row.states else 0)

    def _prepare(self, rows: Sequence[Row], firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Show the head the states before the tokens that it is about to read."""
        states = [
            row.states.taken(first - 1, first - 1 + count)
            for row, first, count in zip(rows, firsts, counts, strict=True)
            if row.states is not None
        ]
        self._head.show(padded(states, max(counts)))

    def _latest(self, logits: mx.array, counts: Sequence[int]) -> mx.array:
        after = self._head.after[mx.arange(len(counts)), mx.array(counts) - 1]
        self._own = after[:, None]
        return super()._latest(logits, counts)

    def _next_logits(self, tokens: mx.array) -> mx.array:
        self._head.show(self._own)
        logits = super()._next_logits(tokens)
        self._own = self._head.after
        return logits
