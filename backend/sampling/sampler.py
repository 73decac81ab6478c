"""One vectorised draw for rows with individual parameters, seeds and positions.

Parameters are arrays, never Python constants of a compiled graph: a new temperature must not
cost a compilation. Temperature is applied first, so top-p and min-p see the distribution that
is drawn from.

Random numbers are pure functions of a request's seed and a position: SplitMix64 (Steele, Lea,
Flood 2014) serves as a hash, so a request draws the same tokens alone, in a batch, and after a
pause.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from backend.core.request import SamplingParams
from backend.sampling.largest import largest

_MASK = (1 << 64) - 1
_COIN_STREAM = 0xA5A5_A5A5


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit words of the MLX random key for one draw."""
    word = _hashed(seed, position)
    return word >> 32, word & 0xFFFF_FFFF


def coin(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) that is independent of the draw at this position."""
    return _hashed(seed ^ _COIN_STREAM, position) / 2.0**64


def _hashed(seed: int, position: int) -> int:
    word = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


class Draw(Protocol):
    """Draws one token for each of some rows."""

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return token ids [R] for logits [R, V] (float32).

        Args:
            logits: After penalties and masks.
            positions: Number of tokens that each row has drawn before.
        """


class _Rows:
    """Parameters of rows, as columns [R, 1]."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._params = params
        self._inverse_temperature = _column([1.0 / p.temperature for p in params])
        self._has_min_p = any(p.min_p > 0.0 for p in params)
        self._log_min_p = mx.log(_column([p.min_p for p in params]))
        self._has_xtc = any(p.xtc_probability > 0.0 for p in params)
        self._log_xtc = mx.log(_column([p.xtc_threshold for p in params]))

    def _keys(self, positions: Sequence[int]) -> mx.array:
        """Return the MLX random keys [R, 2] of the draws."""
        keys = [draw_key(p.seed, n) for p, n in zip(self._params, positions, strict=True)]
        return mx.array(keys, mx.uint32)

    def _without_top_choices(
        self, x: mx.array, logprobs: mx.array, positions: Sequence[int]
    ) -> mx.array:
        """Exclude all but the least likely token above the threshold, if the coin says so.

        XTC, as its author describes it in text-generation-webui's pull request 6335.
        """
        heads = [
            coin(p.seed, n) < p.xtc_probability
            for p, n in zip(self._params, positions, strict=True)
        ]
        over = logprobs >= self._log_xtc
        ceiling = mx.min(mx.where(over, x, mx.inf), axis=-1, keepdims=True)
        return mx.where(mx.array(heads)[:, None] & over & (x > ceiling), -mx.inf, x)


class DrawFromAll(_Rows):
    """A `Draw` of rows without top-k."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        super().__init__(params)
        cut = [row for row, p in enumerate(params) if p.top_p < 1.0]
        self._cut = mx.array(cut) if cut else None
        self._top_p = _column([params[row].top_p for row in cut])

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return token ids [R]."""
        x = logits * self._inverse_temperature
        floor = self._floor(x)
        if floor is not None:
            x = mx.where(x >= floor, x, -mx.inf)
        if self._has_xtc:
            logprobs = x - mx.logsumexp(x, axis=-1, keepdims=True)
            x = self._without_top_choices(x, logprobs, positions)
        return mx.vmap(_categorical)(x, self._keys(positions)).astype(mx.uint32)

    def _floor(self, x: mx.array) -> mx.array | None:
        """Return the lowest logit [R, 1] kept by top-p and min-p; `None` if both are off."""
        floor = mx.max(x, axis=-1, keepdims=True) + self._log_min_p if self._has_min_p else None
        if self._cut is None:
            return floor
        lowest = mx.full((x.shape[0], 1), -mx.inf)
        lowest[self._cut] = self._lowest_kept(x[self._cut])
        return lowest if floor is None else mx.maximum(floor, lowest)

    def _lowest_kept(self, x: mx.array) -> mx.array:
        """Return the smallest logit [R, 1] of x [R, V] kept by top-p."""
        best = -mx.sort(-x, axis=-1)
        last = mx.full((len(x), 1), x.shape[-1] - 1)
        kept = _before_top_p(best, self._top_p, last)
        count = mx.maximum(kept.sum(axis=-1, keepdims=True), 1)
        return mx.take_along_axis(best, count - 1, axis=-1)


class DrawFromBest(_Rows):
    """A `Draw` of rows with top-k, at a cost that hardly grows with the vocabulary.

    The mass of probability is summed over prefixes only, and noise belongs to a token: so a
    row's draw does not depend on the number of tokens that other rows look at.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        super().__init__(params)
        self._width = max(p.top_k for p in params)
        self._top_k = _column([p.top_k for p in params], mx.int32)
        self._top_p = _column([p.top_p for p in params])

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return token ids [R]."""
        ids, best = largest(logits, self._width)
        x = best * self._inverse_temperature
        x = mx.where(self._kept(x), x, -mx.inf)
        if self._has_xtc:
            over_top = x - x[:, :1]
            total = mx.cumsum(mx.exp(over_top), axis=-1)[:, -1:]
            x = self._without_top_choices(x, over_top - mx.log(total), positions)
        noise = _noise(self._keys(positions), ids)
        drawn = mx.argmax(x + noise, axis=-1, keepdims=True)
        return mx.take_along_axis(ids, drawn, axis=-1)[:, 0].astype(mx.uint32)

    def _kept(self, x: mx.array) -> mx.array:
        """Tell which of the logits [R, width], from the largest, are kept: at least the first."""
        rank = mx.arange(self._width)
        kept = (rank < self._top_k) & _before_top_p(x, self._top_p, self._top_k - 1)
        if self._has_min_p:
            kept &= x >= x[:, :1] + self._log_min_p
        return kept | (rank == 0)


def _noise(keys: mx.array, ids: mx.array) -> mx.array:
    """Return Gumbel noise [R, W], a function of a row's key [R, 2] and of a token id [R, W]."""
    words = [mx.broadcast_to(keys[:, :1], ids.shape), keys[:, 1:] ^ ids.astype(mx.uint32)]
    return mx.vmap(_gumbel)(mx.stack(words, axis=-1).reshape(-1, 2)).reshape(ids.shape)


def _gumbel(key: mx.array) -> mx.array:
    return mx.random.gumbel(key=key)


def _categorical(row: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(row, key=key)


def _before_top_p(best: mx.array, top_p: mx.array, last: mx.array) -> mx.array:
    """Tell which of the logits [R, W], from the largest, top-p keeps.

    Args:
        best: The logits.
        top_p: [R, 1] part of the mass.
        last: [R, 1] index of the last one that counts.
    """
    weight = mx.exp(best - best[:, :1])
    total = mx.take_along_axis(mx.cumsum(weight, axis=-1), last, axis=-1)
    return mx.cumsum(weight, axis=-1, inclusive=False) < top_p * total


def _column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(values, dtype)[:, None]


class Sampler:
    """Draws one token per row; rebuilt whenever the rows change. Belongs to the main thread.

    A row's draw does not depend on the other rows.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        drawing = [row for row, p in enumerate(params) if not p.is_greedy]
        best = [row for row in drawing if 0 < params[row].top_k < vocab_size]
        groups: list[tuple[list[int], type[DrawFromAll] | type[DrawFromBest]]] = [
            (best, DrawFromBest),
            ([row for row in drawing if row not in best], DrawFromAll),
        ]
        self._count = len(params)
        self._draws: list[tuple[list[int], Draw]] = [
            (rows, kind([params[row] for row in rows])) for rows, kind in groups if rows
        ]

    def draw(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return token ids [B] for logits [B, V] (float32).

        Args:
            logits: One row per request, after penalties and masks.
            positions: Number of tokens that each row has drawn before.
        """
        if self._draws and len(self._draws[0][0]) == self._count:
            return self._draws[0][1](logits, positions)
        tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
        for rows, draw in self._draws:
            places = mx.array(rows)
            tokens[places] = draw(logits[places], [positions[row] for row in rows])
        return tokens
