"""Logits processors for all rows at once: penalties on seen tokens, and biases."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from backend.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    """A row's penalties, and the tokens in its KV cache.

    `token_ids` may be the row's live list: only its first `length` entries are read at the
    start, and later only entries that have left the window.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    length: int


class LogitsAdjuster:
    """Keeps token counts on the device and applies them; rebuilt whenever the rows change."""

    def __init__(self, histories: Sequence[History], vocab_size: int) -> None:
        self._rows = [i for i, h in enumerate(histories) if h.params.adjusts_logits]
        self._histories = [histories[i] for i in self._rows]
        self._lengths = [history.length for history in self._histories]
        self._columns: list[mx.array] = []
        self.counts: mx.array | None = None
        if self._rows:
            self._prepare(vocab_size)

    def adjust(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Count the tokens being fed, then apply the rows' penalties and biases.

        Args:
            logits: [B, V] float32; not modified.
            inputs: Token ids [B] of this step, still on the device.
        """
        if self.counts is None:
            return logits
        self.counts = self._counted(self.counts, inputs[mx.array(self._rows)])
        self._lengths = [length + 1 for length in self._lengths]
        return self._adjusted(logits, self._rows, self.counts)

    def adjust_all(self, logits: mx.array, inputs: Sequence[Sequence[int]]) -> mx.array:
        """Do the same for several positions of each row; call `keep` afterwards.

        Args:
            logits: [N, V] float32, row by row; not modified.
            inputs: Token ids of each row, at least one.
        """
        if self.counts is None:
            return logits
        fed = [inputs[row] for row in self._rows]
        self._columns = [self.counts]
        for place in range(max(map(len, fed))):
            ids = mx.array([tokens[min(place, len(tokens) - 1)] for tokens in fed])
            self._columns.append(self._counted(self._columns[-1], ids, fed, place))
        firsts = [0, *accumulate(map(len, inputs))]
        places = [(n, place) for n, tokens in enumerate(fed) for place in range(len(tokens))]
        counts = mx.stack([self._columns[place + 1][n] for n, place in places])
        targets = [firsts[self._rows[n]] + place for n, place in places]
        return self._adjusted(logits, targets, counts, mx.array([n for n, _ in places]))

    def keep(self, counts: Sequence[int]) -> None:
        """Count this many inputs of each row from the latest `adjust_all`."""
        if self.counts is None:
            return
        kept = [counts[row] for row in self._rows]
        self.counts = mx.stack([self._columns[n][row] for row, n in enumerate(kept)])
        self._lengths = [length + n for length, n in zip(self._lengths, kept, strict=True)]
        self._columns = []

    def _adjusted(
        self,
        logits: mx.array,
        targets: Sequence[int],
        counts: mx.array,
        owners: mx.array | slice = slice(None),
    ) -> mx.array:
        """Return logits [N, V] with the penalties and biases of some rows applied.

        Args:
            logits: [N, V].
            targets: [M] indices of the logits to adjust.
            counts: [M, V] for each of them.
            owners: [M] the row of each, among those that adjust; by default the rows in order.
        """
        places = mx.array(targets)
        repetition, presence, frequency = (values[owners] for values in self._penalties)
        seen = counts > 0
        x = logits[places]
        x = mx.where(seen, mx.where(x > 0, x / repetition, x * repetition), x)
        adjusted = logits[:]
        adjusted[places] = x - presence * seen - frequency * counts + self._bias[owners]
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

    def _counted(
        self,
        counts: mx.array,
        inputs: mx.array,
        fed: Sequence[Sequence[int]] = (),
        place: int = 0,
    ) -> mx.array:
        """Return the counts after one more token per row.

        Args:
            counts: [R, V], counts so far.
            inputs: Token ids [R].
            fed: [R], all inputs of a pass with several per row.
            place: Index of this input among them.
        """
        counts = counts.at[mx.arange(len(self._rows)), inputs].add(1.0)
        passed = [
            (row, _token_at(history, left, fed[row][left - length :] if fed else ()))
            for row, (history, length) in enumerate(
                zip(self._histories, self._lengths, strict=True)
            )
            if history.params.penalty_window
            and (left := length + place - history.params.penalty_window) >= 0
        ]
        if passed:
            rows, tokens = zip(*passed, strict=True)
            counts = counts.at[mx.array(rows), mx.array(tokens)].add(-1.0)
        return counts


def _token_at(history: History, place: int, drafted: Sequence[int]) -> int:
    """Return a token of a row, possibly a drafted one, that has left the window.

    At a place that a row does not reach in the pass, where nothing is drawn, any token will do.
    """
    if place < len(history.token_ids):
        return history.token_ids[place]
    return drafted[0] if drafted else history.token_ids[-1]
