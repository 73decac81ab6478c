"""The decode loop: all active rows in one forward pass per step, one step ahead of the host.

A step dispatches the forward pass over the tokens in flight, and only then reads those
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import mlx.core as mx

from backend.engine.drafts.drafting import Drafting
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.network import Caches, Network
from backend.engine.passes.attempt import Attempt, Drafts, RowStep, taken
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.drawn import Drawn
from backend.engine.passes.draws import Draws
from backend.engine.rows.row import Row

Landed: TypeAlias = Callable[[Sequence[RowStep]], None]
"""Receives landed tokens."""

NoteStep: TypeAlias = Callable[[int, float], None]
"""Learns the seconds of a step that gave one token to each of some rows."""


def ignore_step(_rows: int, _seconds: float) -> None:
    """Learn nothing."""


@dataclass(slots=True)
class _Flight:
    """Tokens [B] being computed, and their rows."""

    rows: tuple[Row, ...]
    drawn: Drawn
    has_landed: bool = False


class Batch:
    """The rows being decoded; belongs to the main thread.

    Attributes:
        note_step: Learns from undisturbed steps.
    """

    def __init__(
        self,
        network: Network,
        fresh_caches: CacheFactory,
        vocab_size: int,
        drafting: Drafting | None = None,
    ) -> None:
        """Start without rows.

        Args:
            network: The model.
            fresh_caches: Makes its caches.
            vocab_size: Width of its logits.
            drafting: Drafts tokens; `None` if every pass takes one token per row.
        """
        self._network = network
        self._fresh_caches = fresh_caches
        self._vocab_size = vocab_size
        self._drafting = drafting
        self.note_step: NoteStep = ignore_step
        self._clock = perf_counter
        self._rows: list[Row] = []
        self._joining: list[Row] = []
        self._caches = BatchCaches(fresh_caches.plan)
        self._flight: _Flight | None = None
        self._departed: list[Row] = []
        self._draws = Draws((), vocab_size)

    def begin_drafts(self, drafting: Drafting) -> None:
        """Draft for the present rows, and those to come."""
        self._drafting = drafting
        drafting.follow(self._rows)

    @property
    def is_empty(self) -> bool:
        """Whether a step would have nothing to do."""
        return self._flight is None and not self._joining

    @property
    def awaits_first_token(self) -> bool:
        """Whether the first token of a row is in flight."""
        flight = self._flight
        return flight is not None and any(row.generated == 0 for row in flight.rows)

    def add(self, row: Row) -> None:
        """Add a prefilled row at the next step; the batch takes over its cache."""
        self._joining.append(row)

    def step(self, *, meanwhile: Callable[[], None], landed: Landed) -> None:
        """Dispatch the next forward pass, and deliver the tokens of the previous one.

        Args:
            meanwhile: Called between the host's work and the device's, so that threads it
                wakes run in parallel: on a CPU, dispatching takes as long as computing.
            landed: Receives the tokens as soon as their rows have them: if the rest of the step
                fails, they are not lost.
        """
        started = self._clock()
        before, self._flight = self._flight, None
        waits = before is not None and not before.has_landed
        if wants_drafts := self._drafting is not None and self._drafting.may_draft:
            # A draft follows the latest token.
            landed(_landed(before))
        regroups = self._clock()
        inputs = self._regroup(before)
        # Rows that join and leave are no cost of drafts.
        started += self._clock() - regroups
        if inputs is None:
            meanwhile()
            landed(_landed(before))
            return
        drafts = self._drafts(before)
        if self._drafting is not None and drafts:
            self._verify(self._drafting, drafts, meanwhile, landed)
        else:
            self._advance(inputs, before, meanwhile, landed)
        if waits and not wants_drafts:
            # It took as long as the pass in flight.
            seconds = self._clock() - started
            self.note_step(len(self._rows), seconds)
            self._observe(len(self._rows), seconds)
        elif self._drafting is not None:
            self._drafting.settle(self._clock() - started, waits + bool(drafts))

    def _observe(self, tokens: int, seconds: float) -> None:
        if self._drafting is not None:
            self._drafting.observe(len(self._rows), tokens, seconds)

    def _advance(
        self,
        inputs: mx.array,
        before: _Flight | None,
        meanwhile: Callable[[], None],
        landed: Landed,
    ) -> None:
        """Compute one token of each row; it is read once the next pass is dispatched."""
        is_idle = before is None or before.has_landed
        logits = self._caches.forward(self._network, inputs[:, None], is_idle=is_idle)
        logits = logits[:, -1].astype(mx.float32)
        if self._draws.has_grammars:
            # A mask needs the previous token, the forward pass does not: the host reads that token
            # and computes the masks during the pass.
            meanwhile()
            mx.async_eval(logits)
            landed(_landed(before))
            self._flight = self._drawn(inputs, logits)
            mx.async_eval(*self._flight.drawn.arrays)
        else:
            self._flight = self._drawn(inputs, logits)
            meanwhile()
            mx.async_eval(*self._flight.drawn.arrays)
            landed(_landed(before))
        if self._drafting is not None:
            self._drafting.see(self._rows, [1] * len(self._rows), self._caches.by_row)

    def _verify(
        self,
        drafting: Drafting,
        drafts: Drafts,
        meanwhile: Callable[[], None],
        landed: Landed,
    ) -> None:
        """Compute the latest token of each row with its drafts.

        All tokens up to the first difference from the draft are the row's own.
        """
        started = self._clock()
        attempt = Attempt(self._rows, drafts, keeps_parts=self._caches.keeps_parts)
        logits = self._caches.take(self._network, attempt.inputs).astype(mx.float32)
        mx.async_eval(logits)
        drawn = self._draws.verify(logits, attempt)
        meanwhile()
        mx.async_eval(*drawn.arrays)
        steps = attempt.confirmed(drawn)
        landed(steps)
        drafting.learn(attempt.accepted)
        self._caches.keep(attempt.kept)
        self._draws.keep(attempt.kept)
        drafting.see(self._rows, attempt.kept, self._caches.by_row)
        latest = mx.array([row.token_ids[-1] for row in self._rows], mx.uint32)
        self._flight = _Flight(tuple(self._rows), Drawn(latest, None, ()), has_landed=True)
        self._observe(self._caches.computed(attempt.column.counts), self._clock() - started)

    def _drafts(self, before: _Flight | None) -> Drafts:
        """Return the drafts worth trying in the next pass; none while tokens are in flight.

        A row that went back before its own tokens must feed them again, with drafts or without.
        """
        is_read = before is None or before.has_landed
        if self._drafting is None or not is_read or not self._caches.can_go_back:
            return ()
        caches = self._caches
        drafts = self._drafting.drafts(keeps_parts=caches.keeps_parts, packs=caches.packs)
        return drafts if any(drafts) or any(row.unfed > 1 for row in self._rows) else ()

    def land(self) -> list[RowStep]:
        """Return the tokens in flight now, before anything other than a step is computed."""
        return _landed(self._flight)

    def departed(self) -> list[Row]:
        """Return the rows that left since the last call, each with its own caches again."""
        departed, self._departed = self._departed, []
        return departed

    def astray(self) -> list[tuple[Row, str]]:
        """Return the rows whose grammars are at a dead end, with the reasons."""
        if not self._draws.has_grammars:
            return []
        guided = [(row, row.matcher) for row in self._rows if not row.has_left]
        return [(row, problem) for row, m in guided if m and (problem := m.error)]

    def clear(self) -> None:
        """Drop all rows and everything in flight."""
        self._rows, self._joining, self._flight = [], [], None
        self._caches.regroup([], [])
        self._departed = []

    def cache_bytes(self) -> int:
        """Return the size of the batch's KV caches, including a draft model's."""
        return self._caches.nbytes + (self._drafting.nbytes if self._drafting else 0)

    def _drawn(self, inputs: mx.array, logits: mx.array) -> _Flight:
        """Build the graph of the next tokens; nothing is computed yet."""
        drawn = self._draws.draw(logits, inputs)
        for row in self._rows:
            row.fed += 1
            row.drawn += 1
        return _Flight(tuple(self._rows), drawn)

    def _regroup(self, before: _Flight | None) -> mx.array | None:
        """Remove and add rows; return the input tokens [B] of the next pass, if any."""
        staying = [i for i, row in enumerate(self._rows) if row.wants_more]
        joining = [row for row in self._joining if row.wants_more]
        self._depart(staying)
        self._departed += [row for row in self._joining if row.is_paused]
        self._joining = []
        parts = []
        if staying and before is not None:
            everyone = len(staying) == len(self._rows)
            tokens = before.drawn.tokens
            parts.append(tokens if everyone else tokens[mx.array(staying)])
        if joining:
            parts.append(mx.array([row.token_ids[-1] for row in joining], mx.uint32))
        if joining or len(staying) < len(self._rows):
            self._caches.regroup(staying, [self._taken_cache(row) for row in joining])
            self._rows = [self._rows[i] for i in staying] + joining
            self._draws = Draws(self._rows, self._vocab_size)
            if self._drafting is not None:
                self._drafting.follow(self._rows)
        return mx.concatenate(parts) if parts else None

    def _depart(self, staying: Sequence[int]) -> None:
        """Return their caches to the leaving rows."""
        for i in set(range(len(self._rows))).difference(staying):
            row = self._rows[i]
            row.cache = self._caches.extract(i)
            self._departed.append(row)

    def _taken_cache(self, row: Row) -> Caches:
        """Take over a row's caches; a prompt of one token has none."""
        cache, row.cache = row.cache, None
        return self._fresh_caches() if cache is None else cache


def _landed(flight: _Flight | None) -> list[RowStep]:
    """Wait for the tokens of a flight and give them to their rows, once."""
    if flight is None or flight.has_landed:
        return []
    flight.has_landed = True
    token_ids: list[int] = flight.drawn.tokens.tolist()
    logprobs = flight.drawn.read_logprobs()
    return [
        taken(row, token_id, logprobs.get(i))
        for i, (row, token_id) in enumerate(zip(flight.rows, token_ids, strict=True))
        if not row.has_left
    ]
