"""The rows of a batch for a head, which reads each token with the hidden state before it."""

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.drafts.pricing import ByRow, PassCosts
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.draft_batch import DraftBatch
from backend.engine.rows.row import Row
from backend.engine.rows.row_states import RowStates, padded
from backend.model.heads.network import HeadNetwork, HiddenTap

# Too many tokens to be worth reading: the state before the latest token is unknown.
_UNREADABLE = 2**30


class HeadBatch(DraftBatch):
    """A `DraftModel` that reads the states of the model; belongs to the main thread.

    It reads a row from the first token after a known state on. States of prompts from the prompt
    cache are unknown.
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
        """Start without rows; the tap is on the model, and the rest as in `DraftBatch`."""
        sizes = {"own_vocab_size": vocab_size, "vocab_size": vocab_size}
        super().__init__(head, fresh_caches, costs, **sizes)
        self._head = head
        self._tap = tap
        # The states [B, 1, D] of the head after the latest token of each row.
        self._own = mx.zeros((0, 1, 0))

    def see(self, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow) -> None:
        """Store the states of the model's latest dispatched pass.

        Args:
            rows: The rows of the pass, which already include the tokens that they keep.
            counts: The number of tokens of the pass that each row keeps.
            by_row: Returns the states as [B, T, D].
        """
        layers = list(map(by_row, self._tap.take()))
        if not layers:
            return
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count and row.request.may_speculate:
                row.states = row.states or RowStates()
                row.states.add(layers, place, count, row.fed)

    def unread(self, row: Row) -> int:
        """Return the number of unread tokens of a row, not counting the latest."""
        if row.states is None or row.states.stop < len(row.token_ids) - 1:
            return _UNREADABLE
        return super().unread(row)

    def _first(self, row: Row) -> int:
        return max(super()._first(row), row.states.first + 1 if row.states else 0)

    def _prepare(self, rows: Sequence[Row], firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Give the head the states before the tokens that it reads next."""
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
