"""The decode loop: all active rows in one forward pass per step, one step ahead of the host.

A step dispatches the forward pass that eats the tokens in flight, and only then reads those
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from backend.core.step import TokenStep
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.network import Caches, Network
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.logprobs import LogprobsInFlight, logprobs_in_flight
from backend.engine.rows.row import Row
from backend.sampling.masks import TokenMasks
from backend.sampling.processors import History, LogitsAdjuster
from backend.sampling.sampler import Sampler


class RowStep(NamedTuple):
    """A token that landed, and the row it belongs to."""

    row: Row
    step: TokenStep


Landed: TypeAlias = Callable[[Sequence[RowStep]], None]
"""Takes tokens that have landed."""


@dataclass(slots=True)
class _Flight:
    """Tokens [B] that are being computed, and the rows that they were drawn for.

    Attributes:
        arrays: All that one pass evaluates.
    """

    rows: tuple[Row, ...]
    tokens: mx.array
    logprobs: LogprobsInFlight | None
    arrays: tuple[mx.array, ...]
    has_landed: bool = False


class Batch:
    """The rows being decoded; belongs to the main thread."""

    def __init__(self, network: Network, fresh_caches: CacheFactory, vocab_size: int) -> None:
        self._network = network
        self._fresh_caches = fresh_caches
        self._vocab_size = vocab_size
        self._rows: list[Row] = []
        self._joining: list[Row] = []
        self._caches = BatchCaches(fresh_caches.plan)
        self._flight: _Flight | None = None
        self._departed: list[Row] = []
        self._masks = TokenMasks((), vocab_size)

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
        """Let a prefilled row join at the next step; the batch takes over its cache."""
        self._joining.append(row)

    def step(self, *, meanwhile: Callable[[], None], landed: Landed) -> None:
        """Dispatch the next forward pass, and hand out the tokens of the one before.

        Args:
            meanwhile: Called between the host's work and the device's, so that the threads it
                wakes run beside the device: on a CPU, dispatching takes as long as computing.
            landed: Takes the tokens as soon as their rows have them: if the rest of the step
                fails, they are not lost.
        """
        before, self._flight = self._flight, None
        inputs = self._regroup(before)
        if inputs is None:
            meanwhile()
            landed(_landed(before))
            return
        logits = self._caches.forward(self._network, inputs[:, None])[:, -1].astype(mx.float32)
        if self._masks:
            # A mask needs the token before, the forward pass does not: the host reads that token
            # and finds the masks beside the pass.
            meanwhile()
            mx.async_eval(logits)
            landed(_landed(before))
            self._flight = self._drawn(inputs, logits)
            mx.async_eval(*self._flight.arrays)
        else:
            self._flight = self._drawn(inputs, logits)
            meanwhile()
            mx.async_eval(*self._flight.arrays)
            landed(_landed(before))

    def land(self) -> list[RowStep]:
        """Return the tokens in flight now, before something else than a step is computed."""
        return _landed(self._flight)

    def departed(self) -> list[Row]:
        """Return the rows that have left since the last call, each with its own caches again."""
        departed, self._departed = self._departed, []
        return departed

    def astray(self) -> list[tuple[Row, str]]:
        """Return the rows whose grammars can go no further, and why."""
        if not self._masks:
            return []
        guided = [(row, row.matcher) for row in self._rows if not row.has_left]
        return [(row, problem) for row, m in guided if m and (problem := m.error)]

    def clear(self) -> None:
        """Let go of all rows and of everything in flight."""
        self._rows, self._joining, self._flight = [], [], None
        self._caches.regroup([], [])
        self._departed = []

    def cache_bytes(self) -> int:
        """Return what the batch's KV caches occupy."""
        return self._caches.nbytes

    def _drawn(self, inputs: mx.array, logits: mx.array) -> _Flight:
        """Build the graph of the next tokens; nothing of it is computed yet."""
        adjusted = self._masks.apply(self._adjuster.adjust(logits, inputs))
        tokens = self._sampler.draw(adjusted, [row.drawn for row in self._rows])
        wanted = [row.request.top_logprobs for row in self._rows]
        logprobs = logprobs_in_flight(logits, tokens, wanted)
        for row in self._rows:
            row.fed += 1
            row.drawn += 1
        counts = () if self._adjuster.counts is None else (self._adjuster.counts,)
        arrays = (tokens, *counts, *(logprobs.arrays if logprobs else ()))
        return _Flight(tuple(self._rows), tokens, logprobs, arrays)

    def _regroup(self, before: _Flight | None) -> mx.array | None:
        """Let rows leave and join; return the input tokens [B] of the next pass, if any."""
        staying = [i for i, row in enumerate(self._rows) if row.wants_more]
        joining = [row for row in self._joining if row.wants_more]
        self._depart(staying)
        self._departed += [row for row in self._joining if row.is_paused]
        self._joining = []
        parts = []
        if staying and before is not None:
            everyone = len(staying) == len(self._rows)
            parts.append(before.tokens if everyone else before.tokens[mx.array(staying)])
        if joining:
            parts.append(mx.array([row.token_ids[-1] for row in joining], mx.uint32))
        if joining or len(staying) < len(self._rows):
            self._caches.regroup(staying, [self._taken_cache(row) for row in joining])
            self._rows = [self._rows[i] for i in staying] + joining
            self._prepare_sampling()
        return mx.concatenate(parts) if parts else None

    def _depart(self, staying: Sequence[int]) -> None:
        """Give the rows that leave their caches back."""
        for i in set(range(len(self._rows))).difference(staying):
            row = self._rows[i]
            row.cache = self._caches.extract(i)
            self._departed.append(row)

    def _taken_cache(self, row: Row) -> Caches:
        """Take over a row's caches; a prompt of one token comes without."""
        cache, row.cache = row.cache, None
        return self._fresh_caches() if cache is None else cache

    def _prepare_sampling(self) -> None:
        params = [row.request.sampling for row in self._rows]
        self._sampler = Sampler(params, self._vocab_size)
        self._masks = TokenMasks([row.matcher for row in self._rows], self._vocab_size)
        self._adjuster = LogitsAdjuster(
            [History(row.request.sampling, row.token_ids, row.fed) for row in self._rows],
            self._vocab_size,
        )


def _landed(flight: _Flight | None) -> list[RowStep]:
    """Wait for the tokens of a flight and hand them to their rows, once."""
    if flight is None or flight.has_landed:
        return []
    flight.has_landed = True
    token_ids: list[int] = flight.tokens.tolist()
    logprobs = flight.logprobs.read() if flight.logprobs else {}
    steps = []
    for i, (row, token_id) in enumerate(zip(flight.rows, token_ids, strict=True)):
        if row.has_left:
            continue
        reason = row.take(token_id)
        row.has_left = reason is not None
        steps.append(RowStep(row, TokenStep(token_id, reason, logprobs.get(i))))
    return steps
