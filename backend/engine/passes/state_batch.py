"""The rows of a batch in a drafter that reads states of the model, and no tokens."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Generic, TypeVar

import mlx.core as mx

from backend.engine.drafts.pricing import (
    MAX_PASS_TOKENS,
    ByRow,
    Company,
    DraftModel,
    PassCosts,
)
from backend.engine.kv.layer import POSITIONS, install, resized
from backend.engine.kv.ledger import with_spare
from backend.engine.kv.spans import index_of
from backend.engine.passes.draft_batch import (
    UNREADABLE,
    LogitsAfter,
    OwnDraws,
    has_states,
    note_states,
)
from backend.engine.rows.row import Row, padded_states
from backend.model.blocks import BlockNetwork, Pair
from backend.model.drafters import AssistantNetwork
from backend.model.heads import HiddenTap, StateReader

HeadT = TypeVar("HeadT", bound=StateReader)


class _StateBatch(Generic[HeadT]):
    def __init__(self, head: HeadT, tap: HiddenTap, costs: PassCosts, *, vocab_size: int) -> None:
        """Start without rows; the tap is on the model."""
        self.costs = costs
        self.clock = perf_counter
        self._head = head
        self._tap = tap
        self._draws = OwnDraws(vocab_size)

    def see(self, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow) -> None:
        """Store the states of the model's latest dispatched pass."""
        note_states(self._tap, rows, counts, by_row)

    def _drafts(
        self, everyone: Sequence[Row], depth: int, logits_after: LogitsAfter
    ) -> dict[Row, list[int]]:
        return dict(zip(everyone, self._draws.write(everyone, depth, logits_after), strict=True))


class AssistantBatch(_StateBatch[AssistantNetwork]):
    """A `DraftModel` that attends to the keys of the batch itself; belongs to the main thread.

    Each pass gets all rows of the batch, whose caches it reads in their places.
    """

    nbytes = 0
    most_tokens = MAX_PASS_TOKENS
    is_at_once = False
    _company: Company | None = None

    def join(self, company: Company) -> None:
        """Read the caches of a batch."""
        install()
        self._company = company

    def follow(self, rows: Sequence[Row]) -> None:
        """Do nothing: a row has all that it needs."""

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

        drafts = self._drafts(everyone, depth, logits_after)
        self.costs.observe(len(drafts), len(drafts), (self.clock() - started) / depth)
        return [drafts[row] for row in rows]

    def _state(self, row: Row) -> mx.array:
        """Return the state [1, D] before the latest token of a row; zeros if it is unknown."""
        if row.states is None or not has_states(row):
            return mx.zeros((1, self._head.width), self._head.dtype)
        return row.states.taken(row.states.stop - 1, row.states.stop)


class Readings:
    """The positions read of some rows: keys and values of every layer, padded on the right.

    Attributes:
        pairs: By layer, [B, heads, capacity, width]; none if nothing has been read.
        lengths: Positions of each row.
    """

    def __init__(self, pairs: Sequence[Pair], lengths: Sequence[int]) -> None:
        self.pairs = list(pairs)
        self.lengths = list(lengths)

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(array.nbytes for pair in self.pairs for array in pair)

    def add(self, new: Sequence[Pair], counts: Sequence[int]) -> None:
        """Append the first `counts` of new positions [B, heads, T, width] to the rows."""
        width = new[0][0].shape[POSITIONS]
        needed = max(self.lengths) + width
        old = self.pairs or [_cut(pair, 0) for pair in new]
        room = old[0][0].shape[POSITIONS]
        room = room if needed <= room else with_spare(needed)
        places = mx.array(self.lengths)[:, None, None, None] + mx.arange(width)[:, None]
        self.pairs = [
            (_written(keys, new_keys, places, room), _written(values, new_values, places, room))
            for (keys, values), (new_keys, new_values) in zip(old, new, strict=True)
        ]
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]

    def of(self, rows: Sequence[int]) -> "Readings":
        """Return those of some rows, at least one."""
        lengths = [self.lengths[row] for row in rows]
        take, stop = index_of(rows), max(lengths)
        pairs = ((keys[take], values[take]) for keys, values in self.pairs)
        return Readings([_cut(pair, stop) for pair in pairs], lengths)

    def seen(self) -> list[Pair]:
        """Return the arrays without spare positions."""
        return [_cut(pair, max(self.lengths)) for pair in self.pairs]


def _cut(pair: Pair, stop: int) -> Pair:
    keys, values = pair
    return keys[:, :, :stop], values[:, :, :stop]


def _written(old: mx.array, new: mx.array, places: mx.array, room: int) -> mx.array:
    index = mx.broadcast_to(places, new.shape)
    return mx.put_along_axis(resized(old, room), index, new, axis=POSITIONS)


def together(parts: Sequence[Readings]) -> Readings:
    """Return the readings of all rows of several."""
    lengths = [length for part in parts for length in part.lengths]
    like = next((part.pairs for part in parts if part.pairs), [])
    room = max((part.pairs[0][0].shape[POSITIONS] for part in parts if part.pairs), default=0)
    pairs = []
    for layer, blank in enumerate(like):
        columns = zip(*(_pair(part, layer, blank) for part in parts), strict=True)
        keys, values = (mx.concatenate([resized(a, room) for a in column]) for column in columns)
        pairs.append((keys, values))
    return Readings(pairs, lengths)


def _pair(part: Readings, layer: int, like: Pair) -> Pair:
    """Return the arrays of a layer; empty ones if nothing has been read."""
    if part.pairs:
        return part.pairs[layer]
    keys, values = (mx.zeros((len(part.lengths), a.shape[1], 0, a.shape[3]), a.dtype) for a in like)
    return keys, values


# A row that lacks more is read alone, because the others would be padded to it.
_MOST_UNREAD_TOKENS = 32


class BlockBatch(_StateBatch[BlockNetwork]):
    """A `DraftModel` that writes a block in one pass; belongs to the main thread.

    It reads states of confirmed tokens only, so it never goes back. States of prompts from the
    prompt cache are unknown.
    """

    is_at_once = True

    def __init__(
        self, head: BlockNetwork, tap: HiddenTap, costs: PassCosts, *, vocab_size: int
    ) -> None:
        """Start without rows; the tap is on the model."""
        super().__init__(head, tap, costs, vocab_size=vocab_size)
        self.most_tokens = head.most_tokens
        self._rows: list[Row] = []
        self._readings = Readings([], [])
        # Single rows, and for all rows the next token whose state is to be read.
        self._apart: dict[Row, Readings] = {}
        self._next: dict[Row, int] = {}

    @property
    def nbytes(self) -> int:
        """Size of all that has been read."""
        return self._readings.nbytes + sum(each.nbytes for each in self._apart.values())

    def join(self, company: Company) -> None:
        """Do nothing: it keeps all that it needs."""

    def follow(self, rows: Sequence[Row]) -> None:
        """Forget all other rows."""
        kept = set(rows)
        self._apart = {row: own for row, own in self._apart.items() if row in kept}
        self._next = {row: place for row, place in self._next.items() if row in kept}
        self._gather([row for row in self._rows if row in kept])

    def unread(self, row: Row) -> int:
        """Return the number of unread tokens of a row, not counting the latest."""
        return len(row.token_ids) - 1 - self._first(row) if has_states(row) else UNREADABLE

    def _first(self, row: Row) -> int:
        """Return the next token whose state is to be read; older ones may be lost."""
        return max(self._next.get(row, 0), row.states.first if row.states else 0)

    def read(self, row: Row, count: int) -> float:
        """Read the next `count` tokens of a row, at most the missing ones; return the seconds."""
        started = self.clock()
        self._part([row])
        own = self._apart.get(row) or Readings([], [0])
        self._append(own, [row], [count])
        mx.eval(own.pairs)
        self._apart[row] = own
        seconds = self.clock() - started
        self.costs.observe(1, count, seconds)
        return seconds

    def write(self, rows: Sequence[Row], depth: int) -> list[list[int]]:
        """Return a draft of `depth` tokens for each row."""
        started = self.clock()
        self._part([row for row in self._rows if self.unread(row) > _MOST_UNREAD_TOKENS])
        self._gather([*self._rows, *(row for row in rows if row not in self._rows)])
        self._append(self._readings, self._rows, list(map(self.unread, self._rows)))
        latest = mx.array([row.token_ids[-1] for row in self._rows], mx.uint32)
        lengths = mx.array(self._readings.lengths)
        block = self._head.write(latest, depth, self._readings.seen(), lengths)
        drafts = self._drafts(self._rows, depth, block.logits_after)
        self.costs.observe(len(drafts), len(drafts), self.clock() - started)
        return [drafts[row] for row in rows]

    def _append(self, readings: Readings, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Read the next `counts` tokens of the rows."""
        firsts = list(map(self._first, rows))
        states = [
            row.states.taken(first, first + count)
            for row, first, count in zip(rows, firsts, counts, strict=True)
            if row.states is not None
        ]
        if width := max(counts):
            new = self._head.read(padded_states(states, width), mx.array(readings.lengths))
            readings.add(new, counts)
        self._next |= {r: first + n for r, first, n in zip(rows, firsts, counts, strict=True)}

    def _part(self, rows: Sequence[Row]) -> None:
        """Take rows out of the batch."""
        for row in rows:
            if row in self._rows:
                self._apart[row] = self._readings.of([self._rows.index(row)])
        self._gather([row for row in self._rows if row not in rows])

    def _gather(self, rows: Sequence[Row]) -> None:
        """Let the batch have these rows: some that stay, and then others."""
        staying = [n for n, row in enumerate(self._rows) if row in rows]
        joining = rows[len(staying) :]
        if not joining and len(staying) == len(self._rows):
            return
        parts = [self._readings.of(staying)] if staying else []
        parts += [self._apart.pop(row, Readings([], [0])) for row in joining]
        self._readings = together(parts)
        self._rows = list(rows)


BATCHES: Mapping[type[StateReader], Callable[..., DraftModel]] = {
    AssistantNetwork: AssistantBatch,
    BlockNetwork: BlockBatch,
}
"""The batches of drafters that read no tokens, by their networks."""
