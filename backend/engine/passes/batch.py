"""The decode loop: all active rows in one forward pass per step, one step ahead of the host.

A step dispatches the forward pass over the tokens in flight, and only then reads those
tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeAlias, TypeVar

import mlx.core as mx

from backend.core.step import StepLogprobs, TokenStep
from backend.engine.drafts.drafting import Drafting
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.kv.spans import Column
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Decoder
from backend.engine.rows.row import Row
from backend.model.device import DEVICE
from backend.sampling.sampler import History, LogitsAdjuster, Sampler, TokenMasks, largest

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LogprobsInFlight:
    """Log-probabilities being computed.

    Attributes:
        rows: Index in the batch, and number of alternatives, of each row that requests them.
        chosen: [R, 1] of the drawn token.
        top_ids: [R, K] likeliest ids, the likeliest first; K is the largest requested number.
        top: [R, K] their log-probabilities.
    """

    rows: tuple[tuple[int, int], ...]
    chosen: mx.array
    top_ids: mx.array
    top: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays to evaluate."""
        return self.chosen, self.top_ids, self.top

    def read(self) -> dict[int, StepLogprobs]:
        """Wait for the values and return them by index in the batch, likeliest first."""
        values = zip(
            self.rows, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True
        )
        return {
            row: StepLogprobs(logprob=chosen, top=tuple(zip(ids[:count], top[:count], strict=True)))
            for (row, count), (chosen,), ids, top in values
        }


def logprobs_in_flight(
    logits: mx.array, tokens: mx.array, wanted: Sequence[int | None]
) -> LogprobsInFlight | None:
    """Start computing log-probabilities of the model's own distribution.

    Args:
        logits: [B, V] float32, before penalties, masks and temperature.
        tokens: [B] drawn ids.
        wanted: Alternatives per row; `None` is a row without.
    """
    rows = tuple((i, count) for i, count in enumerate(wanted) if count is not None)
    if not rows:
        return None
    if len(rows) < len(wanted):
        index = mx.array([i for i, _ in rows])
        logits, tokens = logits[index], tokens[index]
    total = DEVICE.log_sum_exp(logits)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)
    count = min(max(max(n for _, n in rows), 1), logits.shape[-1])
    ids, top = largest(logits, count)
    return LogprobsInFlight(rows, chosen - total, ids, top - total)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens [N] that are being computed, and log-probabilities that are wanted, by index."""

    tokens: mx.array
    logprobs: LogprobsInFlight | None
    arrays: tuple[mx.array, ...]

    def read_logprobs(self) -> dict[int, StepLogprobs]:
        """Wait for the log-probabilities and return them by index."""
        return self.logprobs.read() if self.logprobs else {}


Drafts: TypeAlias = Sequence[tuple[int, ...]]
"""The drafted tokens of each row of a batch."""


class RowStep(NamedTuple):
    """A token that landed, and the row it belongs to."""

    row: Row
    step: TokenStep


class Attempt:
    """The inputs of each row: its own tokens that are not in its KV cache, then its draft.

    Attributes:
        inputs: [B] of each row.
        starts: [B] own tokens before the latest.
        drafts: [B] of each row.
        accepted: [B] accepted tokens of each draft, once known.
        kept: [B] inputs that stay in the KV cache of each row.
    """

    def __init__(self, rows: Sequence[Row], drafts: Drafts, *, keeps_parts: bool) -> None:
        """Assemble the inputs.

        Args:
            rows: All rows of the batch; their tokens have been read.
            keeps_parts: Whether a row may keep a part of its inputs; otherwise all or none.
        """
        self._rows = rows
        self._keeps_parts = keeps_parts
        self.drafts = drafts
        self.inputs = [
            [*row.token_ids[row.fed :], *draft] for row, draft in zip(rows, drafts, strict=True)
        ]
        self.starts = [row.unfed - 1 for row in rows]
        self.column = Column(list(map(len, self.inputs)))
        self.accepted: list[int] = []
        self.kept: list[int] = []

    def confirmed(self, drawn: Drawn) -> list[RowStep]:
        """Give the rows the tokens that are theirs of the `drawn` after each input; return them."""
        found: list[int] = drawn.tokens.tolist()
        logprobs = drawn.read_logprobs()
        steps: list[RowStep] = []
        for i, row in enumerate(self._rows):
            latest = self.column.firsts[i] + self.starts[i]
            own = row.confirm(self.drafts[i], found[latest : latest + 1 + len(self.drafts[i])])
            self._keep(row, i, len(own) - 1)
            steps += (taken(row, t, logprobs.get(latest + n)) for n, t in enumerate(own))
        return steps

    def _keep(self, row: Row, i: int, right: int) -> None:
        is_whole = right == len(self.drafts[i])
        kept = self.starts[i] + 1 + right if self._keeps_parts or is_whole else 0
        self.accepted.append(right)
        self.kept.append(kept)
        row.count_fed(kept)


def taken(row: Row, token_id: int, logprobs: StepLogprobs | None) -> RowStep:
    """Give a row its next token; the last one reports its drafts."""
    reason = row.take(token_id)
    if reason is None:
        return RowStep(row, TokenStep(token_id, None, logprobs))
    row.finish()
    return RowStep(row, TokenStep(token_id, reason, logprobs, row.drafted, row.accepted))


class Draws:
    """The chain of each row of a batch; created again whenever the rows change.

    Attributes:
        has_grammars: Whether a row has one: its mask follows from the token before.
        is_lazy: Whether a draw waits for nothing, neither for that token nor for logits.
    """

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        self._rows = rows
        self._params = [row.params.sampling for row in rows]
        self._wanted = [row.params.top_logprobs for row in rows]
        self._has_logprobs = any(count is not None for count in self._wanted)
        self._matchers = [row.matcher for row in rows]
        self._vocab_size = vocab_size
        self._masks = TokenMasks(self._matchers, vocab_size)
        self.has_grammars = bool(self._masks)
        histories = [History(row.params.sampling, row.token_ids, row.fed) for row in rows]
        self._adjuster = LogitsAdjuster(histories, vocab_size)
        self._plain = Sampler(self._params, vocab_size, DEVICE.lowest_kept)
        waits = self._plain.cuts and DEVICE.lowest_kept is not None
        self.is_lazy = not (self.has_grammars or waits)
        self._latest: tuple[Sequence[int], Sampler] | None = None

    def draw(self, logits: mx.array, inputs: mx.array) -> Drawn:
        """Draw the next token of each row from logits [B, V] in float32, after the inputs [B]."""
        adjusted = logits
        if self._adjuster.counts is not None:
            adjusted = self._adjuster.adjust(logits, inputs)
        if self.has_grammars:
            adjusted = self._masks.apply(adjusted)
        tokens = self._plain.draw(adjusted, [row.drawn for row in self._rows])
        return self._drawn(logits, tokens, self._wanted)

    def verify(self, logits: mx.array, attempt: Attempt) -> Drawn:
        """Draw the token after every input of a pass, as if the drafts before it were right.

        Args:
            logits: [N, V] float32, row by row.
        """
        counts = attempt.column.counts
        adjusted = self._adjuster.adjust_all(logits, attempt.inputs)
        latest = [a + b for a, b in zip(attempt.column.firsts, attempt.starts, strict=True)]
        adjusted = self._masks.apply_all(adjusted, attempt.drafts, latest)
        firsts = [row.drawn - start for row, start in zip(self._rows, attempt.starts, strict=True)]
        counted = zip(firsts, counts, strict=True)
        positions = [max(first + place, 0) for first, count in counted for place in range(count)]
        tokens = self._sampler(counts).draw(adjusted, positions)
        return self._drawn(logits, tokens, _repeated(self._wanted, counts))

    def keep(self, counts: Sequence[int]) -> None:
        """Count the first inputs of the latest `verify` for the penalties of each row."""
        self._adjuster.keep(counts)

    def _sampler(self, counts: Sequence[int]) -> Sampler:
        """Return the sampler of a pass by the tokens of each row; the latest is kept."""
        if self._latest is None or self._latest[0] != counts:
            params = _repeated(self._params, counts)
            self._latest = counts, Sampler(params, self._vocab_size, DEVICE.lowest_kept)
        return self._latest[1]

    def _drawn(self, logits: mx.array, tokens: mx.array, wanted: Sequence[int | None]) -> Drawn:
        logprobs = logprobs_in_flight(logits, tokens, wanted) if self._has_logprobs else None
        counts = () if self._adjuster.counts is None else (self._adjuster.counts,)
        return Drawn(tokens, logprobs, (tokens, *counts, *(logprobs.arrays if logprobs else ())))


def _repeated(values: Sequence[_T], counts: Sequence[int]) -> list[_T]:
    """Return each value as many times as its row has tokens."""
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


Landing: TypeAlias = Iterator[Sequence[RowStep]]
"""Yields the tokens that have landed."""

NoteStep: TypeAlias = Callable[[int, float], None]
"""Learns the seconds of a step that gave one token to each of some rows."""


def ignore_step(_rows: int, _seconds: float) -> None:
    """Learn nothing."""


@dataclass(slots=True)
class _Flight:
    """Tokens [B] being computed, and their rows; `has_first`: one may be the first of a row."""

    rows: tuple[Row, ...]
    drawn: Drawn
    has_landed: bool = False
    has_first: bool = False


class Batch:
    """The rows being decoded, in the order of the caches; belongs to the main thread."""

    def __init__(
        self,
        network: Decoder,
        fresh_caches: CacheFactory,
        vocab_size: int,
        drafting: Drafting | None = None,
        note_step: NoteStep = ignore_step,
    ) -> None:
        """Start without rows.

        Args:
            drafting: Drafts tokens; `None` if every pass takes one token per row.
            note_step: Learns the time of each step without drafts.
        """
        self._network = network
        self._fresh_caches = fresh_caches
        self._vocab_size = vocab_size
        self.drafting: Drafting | None = None
        self._note_step = note_step
        self.clock = perf_counter
        self.rows: list[Row] = []
        self._joining: list[Row] = []
        self._has_new = False
        self.caches = BatchCaches(fresh_caches.plan)
        self._flight: _Flight | None = None
        self._departed: list[Row] = []
        self._draws = Draws((), vocab_size)
        if drafting is not None:
            self.begin_drafts(drafting)

    def begin_drafts(self, drafting: Drafting) -> None:
        """Draft for the present rows, and those to come."""
        self.drafting = drafting
        drafting.join(self)
        drafting.follow(self.rows)

    @property
    def is_empty(self) -> bool:
        """Whether a step would have nothing to do."""
        return self._flight is None and not self._joining

    @property
    def awaits_first_token(self) -> bool:
        """Whether the first token of a row is in flight."""
        return self._flight is not None and self._flight.has_first

    def add(self, row: Row) -> None:
        """Add a prefilled row at the next step; the batch takes over its cache."""
        self._joining.append(row)

    def step(self) -> Landing:
        """Dispatch the next forward pass, and yield the tokens of the previous one.

        Yields:
            Tokens as soon as their rows have them: if the rest of the step fails, they are not
            lost.
        """
        started = self.clock()
        before, self._flight = self._flight, None
        waits = before is not None and not before.has_landed
        if wants_drafts := self.drafting is not None and self.drafting.may_draft:
            # A draft follows the latest token.
            yield _landed(before)
        regroups = self.clock()
        inputs = self._regroup(before)
        # Rows that join and leave are no cost of drafts.
        started += self.clock() - regroups
        if inputs is None:
            yield _landed(before)
            return
        drafts = self._drafts(before)
        if self.drafting is not None and drafts:
            yield from self._verify(self.drafting, drafts)
        else:
            logits = self._forward(inputs, before)
            if self._draws.is_lazy:
                flight = self._flight = self._drawn(inputs, logits)
            else:
                # The host reads the token before, and computes masks, during the pass.
                mx.async_eval(logits)
                yield _landed(before)
                flight = self._flight = self._drawn(inputs, logits)
            mx.async_eval(*flight.drawn.arrays)
            yield _landed(before)
            if self.drafting is not None:
                self.drafting.see(self.rows, [1] * len(self.rows), self.caches.by_row)
        if waits and not wants_drafts:
            # It took as long as the pass in flight.
            rows, seconds = len(self.rows), self.clock() - started
            self._note_step(rows, seconds)
            if self.drafting is not None:
                self.drafting.observe(rows, rows, seconds)
        elif self.drafting is not None:
            self.drafting.settle(self.clock() - started, waits + bool(drafts))

    def _forward(self, inputs: mx.array, before: _Flight | None) -> mx.array:
        """Return the logits [B, V] after one more token of each row, lazily."""
        is_idle = before is None or before.has_landed
        logits = self.caches.forward(self._network, inputs[:, None], is_idle=is_idle)
        return logits[:, -1].astype(mx.float32)

    def _verify(self, drafting: Drafting, drafts: Drafts) -> Landing:
        """Compute the latest token of each row with its drafts.

        All tokens up to the first difference from the draft are the row's own.
        """
        started = self.clock()
        attempt = Attempt(self.rows, drafts, keeps_parts=self.caches.keeps_parts)
        logits = self.caches.take(self._network, attempt.inputs).astype(mx.float32)
        mx.async_eval(logits)
        drawn = self._draws.verify(logits, attempt)
        mx.async_eval(*drawn.arrays)
        yield attempt.confirmed(drawn)
        drafting.learn(attempt.accepted)
        self.caches.keep(attempt.kept)
        self._draws.keep(attempt.kept)
        drafting.see(self.rows, attempt.kept, self.caches.by_row)
        latest = mx.array([row.token_ids[-1] for row in self.rows], mx.uint32)
        self._flight = _Flight(tuple(self.rows), Drawn(latest, None, ()), has_landed=True)
        computed = self.caches.computed(attempt.column.counts)
        drafting.observe(len(self.rows), computed, self.clock() - started)

    def _drafts(self, before: _Flight | None) -> Drafts:
        """Return the drafts worth trying in the next pass; none while tokens are in flight.

        A row that went back before its own tokens must feed them again, with drafts or without.
        """
        is_read = before is None or before.has_landed
        if self.drafting is None or not is_read or not self.caches.can_go_back:
            return ()
        caches = self.caches
        drafts = self.drafting.drafts(keeps_parts=caches.keeps_parts, packs=caches.packs)
        return drafts if any(drafts) or any(row.unfed > 1 for row in self.rows) else ()

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
        guided = [(row, row.matcher) for row in self.rows if not row.has_left]
        return [(row, problem) for row, m in guided if m and (problem := m.error)]

    def clear(self) -> None:
        """Drop all rows and everything in flight."""
        self.rows, self._joining, self._flight = [], [], None
        self.caches.regroup([], [])
        self._departed = []

    def cache_bytes(self) -> int:
        """Return the size of the batch's KV caches, including a draft model's."""
        return self.caches.nbytes + (self.drafting.nbytes if self.drafting else 0)

    def _drawn(self, inputs: mx.array, logits: mx.array) -> _Flight:
        """Build the graph of the next tokens; nothing is computed yet."""
        drawn = self._draws.draw(logits, inputs)
        for row in self.rows:
            row.advance()
        has_new, self._has_new = self._has_new, False
        return _Flight(tuple(self.rows), drawn, has_first=has_new)

    def _regroup(self, before: _Flight | None) -> mx.array | None:
        """Remove and add rows; return the input tokens [B] of the next pass, if any."""
        staying = [i for i, row in enumerate(self.rows) if row.wants_more]
        if before is not None and not self._joining and len(staying) == len(self.rows):
            return before.drawn.tokens
        joining = [row for row in self._joining if row.wants_more]
        self._depart(staying)
        self._departed += [row for row in self._joining if row.is_paused]
        self._joining = []
        parts = []
        if staying and before is not None:
            everyone = len(staying) == len(self.rows)
            tokens = before.drawn.tokens
            parts.append(tokens if everyone else tokens[mx.array(staying)])
        if joining:
            parts.append(mx.array([row.token_ids[-1] for row in joining], mx.uint32))
        if joining or len(staying) < len(self.rows):
            # A prompt of one token has none.
            arrivals = [row.release() or self._fresh_caches() for row in joining]
            self.caches.regroup(staying, arrivals)
            self.rows = [self.rows[i] for i in staying] + joining
            self._has_new = self._has_new or bool(joining)
            self._draws = Draws(self.rows, self._vocab_size)
            if self.drafting is not None:
                self.drafting.follow(self.rows)
        return mx.concatenate(parts) if parts else None

    def _depart(self, staying: Sequence[int]) -> None:
        """Return their caches to the leaving rows."""
        for i in set(range(len(self.rows))).difference(staying):
            row = self.rows[i]
            row.hold(self.caches.extract(i))
            self._departed.append(row)


def _landed(flight: _Flight | None) -> list[RowStep]:
    """Wait for the tokens of a flight and give them to their rows, once."""
    if flight is None or flight.has_landed:
        return []
    flight.has_landed = True
    token_ids: list[int] = flight.drawn.tokens.tolist()
    logprobs = flight.drawn.read_logprobs() if flight.drawn.logprobs else {}
    return [
        taken(row, token_id, logprobs.get(i))
        for i, (row, token_id) in enumerate(zip(flight.rows, token_ids, strict=True))
        if not row.has_left
    ]
