"""Logits to tokens, for all rows of a batch: penalties, grammars, draws, log-probabilities."""

from collections.abc import Sequence
from typing import TypeVar

import mlx.core as mx

from backend.engine.passes.attempt import Attempt
from backend.engine.passes.drawn import Drawn
from backend.engine.passes.logprobs import logprobs_in_flight
from backend.engine.rows.row import Row
from backend.sampling.masks import TokenMasks
from backend.sampling.processors import History, LogitsAdjuster
from backend.sampling.sampler import Sampler

_T = TypeVar("_T")


class Draws:
    """The chain of each row of a batch; created again whenever the rows change."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        """Create the chains of rows with at most one token in flight."""
        self._rows = rows
        self._params = [row.request.sampling for row in rows]
        self._wanted = [row.request.top_logprobs for row in rows]
        self._matchers = [row.matcher for row in rows]
        self._vocab_size = vocab_size
        self._masks = TokenMasks(self._matchers, vocab_size)
        histories = [History(row.request.sampling, row.token_ids, row.fed) for row in rows]
        self._adjuster = LogitsAdjuster(histories, vocab_size)
        self._plain = Sampler(self._params, vocab_size)
        self._latest: tuple[Sequence[int], Sampler] | None = None

    @property
    def has_grammars(self) -> bool:
        """Whether a row follows a grammar."""
        return bool(self._masks)

    def draw(self, logits: mx.array, inputs: mx.array) -> Drawn:
        """Draw the next token of each row.

        Args:
            logits: [B, V] float32.
            inputs: [B] ids before them, possibly still on the device.
        """
        adjusted = self._masks.apply(self._adjuster.adjust(logits, inputs))
        tokens = self._plain.draw(adjusted, [row.drawn for row in self._rows])
        return self._drawn(logits, tokens, self._wanted)

    def verify(self, logits: mx.array, attempt: Attempt) -> Drawn:
        """Draw the token after every input of a pass, as if the drafts before it were right.

        Args:
            logits: [N, V] float32, row by row.
            attempt: The pass.
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
            sampler = Sampler(_repeated(self._params, counts), self._vocab_size)
            self._latest = counts, sampler
        return self._latest[1]

    def _drawn(self, logits: mx.array, tokens: mx.array, wanted: Sequence[int | None]) -> Drawn:
        logprobs = logprobs_in_flight(logits, tokens, wanted)
        counts = () if self._adjuster.counts is None else (self._adjuster.counts,)
        return Drawn(tokens, logprobs, (tokens, *counts, *(logprobs.arrays if logprobs else ())))


def _repeated(values: Sequence[_T], counts: Sequence[int]) -> list[_T]:
    """Return each value as many times as its row has tokens."""
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
