"""Logits processors for all rows at once: penalties on seen tokens, and biases."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from backend.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    """The penalties of a row, and the tokens that are in its KV cache.

    `token_ids` may be the row's live list: only its first `length` entries are read at the
    start, and later only entries that a window has passed.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    length: int


class LogitsAdjuster:
    """Keeps token counts on the device and applies them; made anew whenever the rows change."""

    def __init__(self, histories: Sequence[History], vocab_size: int) -> None:
        self._rows = [i for i, h in enumerate(histories) if h.params.adjusts_logits]
        self._histories = [histories[i] for i in self._rows]
        self._steps = 0
        self.counts: mx.array | None = None
        if self._rows:
            self._prepare(vocab_size)

    def adjust(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Count the tokens being fed, then penalise and bias the rows that asked.

        Args:
            logits: [B, V] float32; they are not changed.
            inputs: Token ids [B] of this step, still on the device.
        """
        if self.counts is None:
            return logits
        rows = mx.array(self._rows)
        self.counts = counts = self._counted(self.counts, inputs[rows])
        repetition, presence, frequency = self._penalties
        seen = counts > 0
        x = logits[rows]
        x = mx.where(seen, mx.where(x > 0, x / repetition, x * repetition), x)
        adjusted = logits[:]
        adjusted[rows] = x - presence * seen - frequency * counts + self._bias
        return adjusted

    def _prepare(self, vocab_size: int) -> None:
        counts, bias = np.zeros((2, len(self._rows), vocab_size), np.float32)
        for row, history in enumerate(self._histories):
            window = history.params.penalty_window
            start = max(0, history.length - window) if window else 0
            np.add.at(counts[row], np.array(history.token_ids[start : history.length], int), 1.0)
            biases = history.params.logit_bias
            bias[row, list(biases)] = list(biases.values())
        params = [h.params for h in self._histories]
        self._penalties = [
            mx.array(values)[:, None]
            for values in (
                [p.repetition_penalty for p in params],
                [p.presence_penalty for p in params],
                [p.frequency_penalty for p in params],
            )
        ]
        self.counts, self._bias = mx.array(counts), mx.array(bias)

    def _counted(self, counts: mx.array, inputs: mx.array) -> mx.array:
        counts = counts.at[mx.arange(len(self._rows)), inputs].add(1.0)
        passed = [
            (row, history.token_ids[position])
            for row, history in enumerate(self._histories)
            if history.params.penalty_window
            and (position := history.length + self._steps - history.params.penalty_window) >= 0
        ]
        if passed:
            rows, tokens = zip(*passed, strict=True)
            counts = counts.at[mx.array(rows), mx.array(tokens)].add(-1.0)
        self._steps += 1
        return counts
