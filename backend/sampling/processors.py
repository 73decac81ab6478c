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
    """Keeps token counts on the device and applies them; rebuilt whenever the rows change.

    Only the logits of tokens that a row has seen, or has a bias for, are touched.
    """

    def __init__(self, histories: Sequence[History], vocab_size: int) -> None:
        self._rows = [i for i, h in enumerate(histories) if h.params.adjusts_logits]
        self._histories = [histories[i] for i in self._rows]
        self._lengths = [history.length for history in self._histories]
        self._columns: list[mx.array] = []
        self._touched = mx.zeros((0, 0), mx.int32)
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
        fed = inputs[mx.array(self._rows)]
        self._touch(fed[:, None])
        self.counts = self._counted(self.counts, fed)
        self._lengths = [length + 1 for length in self._lengths]
        return self._adjusted(logits, self._rows, self._of_touched(self.counts))

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
        width = max(map(len, fed))
        columns = mx.array([[*own, *[own[-1]] * (width - len(own))] for own in fed])
        self._touch(columns)
        for place in range(width):
            counted = self._counted(self._columns[-1], columns[:, place], fed, place)
            self._columns.append(counted)
        touched = [self._of_touched(column) for column in self._columns[1:]]
        firsts = [0, *accumulate(map(len, inputs))]
        places = [(n, place) for n, tokens in enumerate(fed) for place in range(len(tokens))]
        counts = mx.stack([touched[place][n] for n, place in places])
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
            targets: [M] indices of the logits to adjust, in ascending order.
            counts: [M, S] for each of them, of the touched tokens.
            owners: [M] the row of each, among those that adjust; by default the rows in order.
        """
        repetition, presence, frequency = (values[owners] for values in self._penalties)
        ids, bias = self._touched[owners], self._of_touched(self._bias)[owners]
        places = None if len(targets) == len(logits) else mx.array(targets)
        chosen = logits if places is None else logits[places]
        seen = counts > 0
        x = mx.take_along_axis(chosen, ids, axis=1)
        x = mx.where(seen, mx.where(x > 0, x / repetition, x * repetition), x)
        x = x - presence * seen - frequency * counts + bias
        chosen = mx.put_along_axis(chosen, ids, x, axis=1)
        if places is None:
            return chosen
        adjusted = logits[:]
        adjusted[places] = chosen
        return adjusted

    def _touch(self, ids: mx.array) -> None:
        """Let tokens [R, n] be adjusted from now on; any number of times the same."""
        self._touched = mx.concatenate([self._touched, ids.astype(mx.int32)], axis=1)

    def _of_touched(self, values: mx.array) -> mx.array:
        """Return the values [R, S] of the touched tokens from those of all [R, V]."""
        return mx.take_along_axis(values, self._touched, axis=1)

    def _prepare(self, vocab_size: int) -> None:
        counts, bias = np.zeros((2, len(self._rows), vocab_size), np.float32)
        touched = []
        for row, history in enumerate(self._histories):
            window = history.params.penalty_window
            start = max(0, history.length - window) if window else 0
            seen = np.array(history.token_ids[start : history.length], int)
            np.add.at(counts[row], seen, 1.0)
            biases = history.params.logit_bias
            bias[row, list(biases)] = list(biases.values())
            touched.append(np.union1d(seen, np.array(list(biases), int)))
        # Any token fills up a row: one that is neither seen nor biased keeps its logit.
        ids = np.zeros((len(touched), max(map(len, touched))), np.int32)
        for row, own in enumerate(touched):
            ids[row, : len(own)] = own
        self._touched = mx.array(ids)
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
