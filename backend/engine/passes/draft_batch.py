"""The rows of a batch in a draft model, and its drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import TypeAlias

import mlx.core as mx

from backend.cache.layers import cache_bytes
from backend.engine.drafts.pricing import MAX_PASS_TOKENS, ByRow, Company, PassCosts
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Caches, Decoder
from backend.engine.rows.row import Row, padded_states
from backend.model.heads import HeadNetwork, HiddenTap
from backend.model.text.prefix import common_length
from backend.sampling.sampler import History, LogitsAdjuster, Sampler

# A row that lacks more is read alone, because the others would be padded to it.
_MOST_UNREAD_TOKENS = 32
# Read in place of tokens that its vocabulary lacks.
_UNKNOWN = 0


LogitsAfter: TypeAlias = Callable[[int, mx.array], mx.array]
"""Returns the logits [B, V] at a place of the drafts, given the token [B] before it."""


class OwnDraws:
    """The draws that rows would make, if the logits of a drafter were those of the model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sampler: tuple[list[Row], Sampler] | None = None

    def write(self, rows: Sequence[Row], depth: int, logits_after: LogitsAfter) -> list[list[int]]:
        """Return a draft of `depth` tokens for each row; all passes are computed as one."""
        adjuster = LogitsAdjuster(list(map(_history, rows)), self._vocab_size)
        sampler = self._current_sampler(rows)
        tokens = mx.array([row.token_ids[-1] for row in rows], mx.uint32)
        drafts: list[mx.array] = []
        for place in range(depth):
            logits = self._fitted(logits_after(place, tokens).astype(mx.float32))
            positions = [row.drawn + place for row in rows]
            tokens = sampler.draw(adjuster.adjust(logits, tokens), positions)
            # The device begins with it while the next pass is being built.
            mx.async_eval(tokens)
            drafts.append(tokens)
        found: list[list[int]] = mx.stack(drafts, axis=1).tolist()
        return found

    def _current_sampler(self, rows: Sequence[Row]) -> Sampler:
        if self._sampler is None or self._sampler[0] != rows:
            params = [row.params.sampling for row in rows]
            self._sampler = list(rows), Sampler(params, self._vocab_size)
        return self._sampler[1]

    def _fitted(self, logits: mx.array) -> mx.array:
        """Return logits as wide as the main model's, whose draws use a number for each id."""
        missing = self._vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return mx.pad(logits, ((0, 0), (0, missing)), constant_values=-mx.inf)


class DraftBatch:
    """The `DraftModel` of a batch; belongs to the main thread.

    A draft is the row's own draw, with its own keys, if the draft model were the model.
    """

    most_tokens = MAX_PASS_TOKENS
    is_at_once = False

    def __init__(
        self,
        network: Decoder,
        fresh_caches: CacheFactory,
        costs: PassCosts,
        *,
        own_vocab_size: int,
        vocab_size: int,
    ) -> None:
        """Start without rows.

        Args:
            fresh_caches: Creates its caches, which keep every position.
            own_vocab_size: Width of its logits; it reads larger ids as another token.
        """
        self.costs = costs
        self.clock = perf_counter
        self._network = network
        self._fresh_caches = fresh_caches
        self._own_vocab_size = own_vocab_size
        self._caches = BatchCaches(fresh_caches.plan)
        # Rows in the batch, with the tokens fed to each beyond its confirmed ones.
        self._rows: list[Row] = []
        self._ahead: list[list[int]] = []
        # Single rows.
        self._apart: dict[Row, Caches] = {}
        self._read: dict[Row, int] = {}
        self._draws = OwnDraws(vocab_size)

    @property
    def nbytes(self) -> int:
        """Size of its caches."""
        apart = sum(cache_bytes(layer) for caches in self._apart.values() for layer in caches)
        return self._caches.nbytes + apart

    def join(self, company: Company) -> None:
        """Do nothing: it has caches of its own."""

    def follow(self, rows: Sequence[Row]) -> None:
        """Forget all other rows."""
        kept = set(rows)
        self._apart = {row: caches for row, caches in self._apart.items() if row in kept}
        self._read = {row: count for row, count in self._read.items() if row in kept}
        if not kept.issuperset(self._rows):
            self._settle()
            self._regroup([row for row in self._rows if row in kept])

    def see(self, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow) -> None:
        """Do nothing: it reads only tokens."""

    def unread(self, row: Row) -> int:
        """Return the number of a row's tokens that it lacks, except the latest."""
        self._settle()
        return len(row.token_ids) - 1 - self._first(row)

    def _first(self, row: Row) -> int:
        """Return the position of a row's next token to read."""
        return self._read.get(row, 0)

    def read(self, row: Row, count: int) -> float:
        """Read the next `count` tokens of a row, at most the missing ones; return the seconds."""
        self._settle()
        started = self.clock()
        self._part([row])
        caches = self._apart.get(row) or self._fresh_caches()
        first = self._first(row)
        tokens = self._known(row.token_ids[first : first + count])
        self._prepare([row], [first], [count])
        self._network(mx.array([tokens]), cache=caches)
        mx.eval([cache.state for cache in caches])
        self._apart[row], self._read[row] = caches, first + count
        seconds = self.clock() - started
        self.costs.observe(1, count, seconds)
        return seconds

    def write(self, rows: Sequence[Row], depth: int) -> list[list[int]]:
        """Return a draft of `depth` tokens for each row."""
        self._settle()
        self._part([row for row in self._rows if self.unread(row) > _MOST_UNREAD_TOKENS])
        self._regroup(self._rows, [row for row in rows if row not in self._rows])
        started = self.clock()
        self._read |= {row: self._first(row) for row in self._rows}
        unread = [row.token_ids[self._read[row] :] for row in self._rows]
        self._ahead = [list(tokens) for tokens in unread]
        drafts = self._drafted(unread, depth)
        for ahead, draft in zip(self._ahead, drafts, strict=True):
            ahead += draft[:-1]
        count = len(self._rows)
        self.costs.observe(count, count, (self.clock() - started) / depth)
        places = {row: place for place, row in enumerate(self._rows)}
        return [drafts[places[row]] for row in rows]

    def _drafted(self, unread: Sequence[Sequence[int]], depth: int) -> list[list[int]]:
        """Feed the rows' missing tokens, then each draft."""
        counts = list(map(len, unread))
        self._prepare(self._rows, [self._read[row] for row in self._rows], counts)
        logits = self._caches.take(self._network, list(map(self._known, unread)))
        self._caches.keep(counts)
        first = self._latest(logits, counts)

        def logits_after(place: int, tokens: mx.array) -> mx.array:
            return self._next_logits(tokens) if place else first

        return self._draws.write(self._rows, depth, logits_after)

    def _prepare(self, rows: Sequence[Row], firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Prepare to read `count` tokens of each row from `first` on."""

    def _latest(self, logits: mx.array, counts: Sequence[int]) -> mx.array:
        """Return the logits [B, V] after the last of the `count` tokens of each row, from all."""
        return logits[mx.array(list(accumulate(counts))) - 1]

    def _next_logits(self, tokens: mx.array) -> mx.array:
        """Feed each row its latest draft [B], and return the logits [B, V]."""
        fed = mx.where(tokens < self._own_vocab_size, tokens, _UNKNOWN)
        return self._caches.forward(self._network, fed[:, None])[:, -1]

    def _settle(self) -> None:
        """Go back to the last confirmed token of each row."""
        if not any(self._ahead):
            return
        wrong = []
        for row, ahead in zip(self._rows, self._ahead, strict=True):
            first = self._read.get(row, 0)
            right = common_length(ahead, row.token_ids[first:-1])
            self._read[row] = first + right
            wrong.append(len(ahead) - right)
        self._ahead = [[] for _ in self._rows]
        self._caches.give_back(wrong)

    def _part(self, rows: Sequence[Row]) -> None:
        """Take rows out of the batch."""
        leaving = [row for row in rows if row in self._rows]
        for row in leaving:
            self._apart[row] = self._caches.extract(self._rows.index(row))
        if leaving:
            self._regroup([row for row in self._rows if row not in leaving])

    def _regroup(self, staying: Sequence[Row], joining: Sequence[Row] = ()) -> None:
        if not joining and len(staying) == len(self._rows):
            return
        places = [self._rows.index(row) for row in staying]
        arrivals = [self._apart.pop(row, []) or self._fresh_caches() for row in joining]
        self._caches.regroup(places, arrivals)
        self._rows = [*staying, *joining]
        self._ahead = [[] for _ in self._rows]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return [t if t < self._own_vocab_size else _UNKNOWN for t in tokens]


def _history(row: Row) -> History:
    """Return the history for a row's penalties: a window stays fixed within a draft."""
    params, tokens = row.params.sampling, row.token_ids
    if params.penalty_window:
        tokens = tokens[-params.penalty_window :]
    return History(replace(params, penalty_window=0), tokens, len(tokens) - 1)


# Too many tokens to be worth reading: the state before the latest token is unknown.
UNREADABLE = 2**30


def has_states(row: Row) -> bool:
    """Tell whether the state before the latest token of a row is known."""
    return row.states is not None and row.states.stop >= len(row.token_ids) - 1


def note_states(tap: HiddenTap, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow) -> None:
    """Give rows their states of the model's latest dispatched pass.

    Args:
        rows: The rows of the pass, which already include the tokens that they keep.
        counts: The number of tokens of the pass that each row keeps.
        by_row: Returns the states as [B, T, D].
    """
    layers = list(map(by_row, tap.take()))
    if not layers:
        return
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if count and row.params.may_speculate:
            row.note_states(layers, place, count)


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
        """Store the states of the model's latest dispatched pass."""
        note_states(self._tap, rows, counts, by_row)

    def unread(self, row: Row) -> int:
        """Return the number of unread tokens of a row, not counting the latest."""
        return super().unread(row) if has_states(row) else UNREADABLE

    def _first(self, row: Row) -> int:
        return max(super()._first(row), row.states.first + 1 if row.states else 0)

    def _prepare(self, rows: Sequence[Row], firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Give the head the states before the tokens that it reads next."""
        states = [
            row.states.taken(first - 1, first - 1 + count)
            for row, first, count in zip(rows, firsts, counts, strict=True)
            if row.states is not None
        ]
        self._head.show(padded_states(states, max(counts)))

    def _latest(self, logits: mx.array, counts: Sequence[int]) -> mx.array:
        after = self._head.after[mx.arange(len(counts)), mx.array(counts) - 1]
        self._own = after[:, None]
        return super()._latest(logits, counts)

    def _next_logits(self, tokens: mx.array) -> mx.array:
        self._head.show(self._own)
        logits = super()._next_logits(tokens)
        self._own = self._head.after
        return logits
