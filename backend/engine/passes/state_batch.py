"""The rows of a batch in a drafter that has no tokens of its own: it reads states of the model."""

from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx

from backend.engine.drafts.pricing import (
    MAX_PASS_TOKENS,
    ByRow,
    Company,
    DraftModel,
    PassCosts,
)
from backend.engine.kv.layer import install
from backend.engine.passes.draft_batch import UNREADABLE, OwnDraws, has_states, note_states
from backend.engine.rows.row import Row
from backend.model.drafters import AssistantNetwork
from backend.model.heads import HiddenTap, StateReader


class AssistantBatch:
    """A `DraftModel` that attends to the keys of the batch itself; belongs to the main thread.

    Each pass gets all rows of the batch, whose caches it reads in their places.
    """

    nbytes = 0
    most_tokens = MAX_PASS_TOKENS
    is_at_once = False

    def __init__(
        self, head: AssistantNetwork, tap: HiddenTap, costs: PassCosts, *, vocab_size: int
    ) -> None:
        """Start without rows; the tap is on the model."""
        self.costs = costs
        self.clock = perf_counter
        self._head = head
        self._tap = tap
        self._draws = OwnDraws(vocab_size)
        self._company: Company | None = None
        install()

    def join(self, company: Company) -> None:
        """Read the caches of a batch."""
        self._company = company

    def follow(self, rows: Sequence[Row]) -> None:
        """Do nothing: a row has all that it needs."""

    def see(self, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow) -> None:
        """Store the states of the model's latest dispatched pass."""
        note_states(self._tap, rows, counts, by_row)

    def unread(self, row: Row) -> int:
        """Return 0, or more than can be read: nothing is known of a row, or it is not in a pass."""
        rows = self._company.rows if self._company else ()
        is_readable = row in rows and has_states(row) and all(other.fed for other in rows)
        return 0 if is_readable else UNREADABLE

    def read(self, row: Row, count: int) -> float:
        """Do nothing: nothing is left to read."""
        del row, count
        return 0.0

    def write(self, rows: Sequence[Row], depth: int) -> list[list[int]]:
        """Return a draft of `depth` tokens for each row."""
        if self._company is None:
            raise RuntimeError("an assistant drafts only for the rows of a batch")
        started = self.clock()
        everyone, shared = list(self._company.rows), self._head.shared
        layers = self._company.caches.latest(list(shared.values()))
        kept = {kind: (layer, layer) for kind, layer in zip(shared, layers, strict=True)}
        places = mx.array([row.fed - 1 for row in everyone], mx.int32)
        states = mx.stack([self._state(row) for row in everyone])

        def logits_after(_place: int, tokens: mx.array) -> mx.array:
            nonlocal states
            states, logits = self._head(tokens, states, kept, places)
            return logits

        drafts = dict(zip(everyone, self._draws.write(everyone, depth, logits_after), strict=True))
        count = len(everyone)
        self.costs.observe(count, count, (self.clock() - started) / depth)
        return [drafts[row] for row in rows]

    def _state(self, row: Row) -> mx.array:
        """Return the state [1, D] before the latest token of a row; zeros if it is unknown."""
        if row.states is None or not has_states(row):
            return mx.zeros((1, self._head.width), self._head.dtype)
        return row.states.taken(row.states.stop - 1, row.states.stop)


def state_batch(head: StateReader, tap: HiddenTap, costs: PassCosts, vocab_size: int) -> DraftModel:
    """Return the drafter for the batches of a model."""
    match head:
        case AssistantNetwork():
            return AssistantBatch(head, tap, costs, vocab_size=vocab_size)
        case _:
            raise TypeError(f"no batches of {type(head).__name__}")
