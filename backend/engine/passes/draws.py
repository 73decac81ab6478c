"""Logits to tokens, for all rows of a batch: penalties, grammars, draws, log-probabilities."""

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.passes.attempt import Attempt
from backend.engine.passes.drawn import Drawn
from backend.engine.passes.logprobs import logprobs_in_flight
from backend.engine.rows.row import Row
from backend.sampling.masks import TokenMasks
from backend.sampling.processors import History, LogitsAdjuster
from backend.sampling.sampler import Sampler


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
        self._samplers: dict[int, Sampler] = {}

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
        tokens = self._sampler(1).draw(adjusted, [row.drawn for row in self._rows])
        return self._drawn(logits, tokens, self._wanted)

    def verify(self, logits: mx.array, attempt: Attempt) -> Drawn:
        """Draw a token at every position of a pass, each as if the previous drafts were right.

        Args:
            logits: [B, W, V] float32.
            attempt: The pass.
        """
        rows, width, _ = logits.shape
        adjusted = self._adjuster.adjust_all(logits, attempt.padded).flatten(0, 1)
        adjusted = self._masks.apply_all(adjusted, attempt.drafts, attempt.starts)
        firsts = [row.drawn - start for row, start in zip(self._rows, attempt.starts, strict=True)]
        positions = [max(first + place, 0) for first in firsts for place in range(width)]
        tokens = self._sampler(width).draw(adjusted, positions)
        wanted = [count for count in self._wanted for _ in range(width)]
        return self._drawn(logits.flatten(0, 1), tokens, wanted).by_row(rows)

    def keep(self, counts: Sequence[int]) -> None:
        """Count the first inputs of the latest `verify` for the penalties of each row."""
        self._adjuster.keep(counts)

    def _sampler(self, width: int) -> Sampler:
        if width not in self._samplers:
            params = [params for params in self._params for _ in range(width)]
            self._samplers[width] = Sampler(params, self._vocab_size)
        return self._samplers[width]

    def _drawn(self, logits: mx.array, tokens: mx.array, wanted: Sequence[int | None]) -> Drawn:
        logprobs = logprobs_in_flight(logits, tokens, wanted)
        counts = () if self._adjuster.counts is None else (self._adjuster.counts,)
        return Drawn(tokens, logprobs, (tokens, *counts, *(logprobs.arrays if logprobs else ())))
