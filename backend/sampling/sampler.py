"""One vectorised draw for rows with individual parameters, seeds and positions.

Parameters are arrays, never Python constants of a compiled graph: a new temperature must not
cost a compilation. Temperature is applied first, so top-p and min-p see the distribution that
is drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.core.request import SamplingParams
from backend.sampling.keys import coin, draw_key


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows being drawn that share one way to find their top-k and top-p floor."""

    rows: mx.array
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]


class Sampler:
    """Draws one token per row; rebuilt whenever the rows change. Belongs to the main thread.

    A row's draw does not depend on the other rows.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        drawing = [(i, p) for i, p in enumerate(params) if not p.is_greedy]
        self._rows = [i for i, _ in drawing]
        self._params = [p for _, p in drawing]
        self._draws_all = len(drawing) == len(params)
        if drawing:
            self._prepare(vocab_size)

    def draw(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return token ids [B] for logits [B, V] (float32).

        Args:
            logits: One row per request, after penalties and masks.
            positions: Number of tokens that each row has drawn before.
        """
        if not self._rows:
            return mx.argmax(logits, axis=-1).astype(mx.uint32)
        at = [positions[i] for i in self._rows]
        if self._draws_all:
            return self._drawn(logits, at)
        rows = mx.array(self._rows)
        tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
        tokens[rows] = self._drawn(logits[rows], at)
        return tokens

    def _prepare(self, vocab_size: int) -> None:
        params = self._params
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        partition = [j for j, k in enumerate(top_k) if k < vocab_size]
        whole_sort = [j for j, p in enumerate(params) if top_k[j] == vocab_size and p.top_p < 1.0]
        self._cuts = [
            _Cut(mx.array(g), tuple(top_k[j] for j in g), tuple(params[j].top_p for j in g))
            for g in (partition, whole_sort)
            if g
        ]
        self._inverse_temperature = mx.array([1.0 / p.temperature for p in params])[:, None]
        self._has_min_p = any(p.min_p > 0.0 for p in params)
        self._log_min_p = mx.log(mx.array([p.min_p for p in params]))[:, None]
        self._has_xtc = any(p.xtc_probability > 0.0 for p in params)
        self._log_xtc = mx.log(mx.array([p.xtc_threshold for p in params]))[:, None]

    def _drawn(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        x = logits * self._inverse_temperature
        floor = self._floor(x)
        if floor is not None:
            x = mx.where(x >= floor, x, -mx.inf)
        if self._has_xtc:
            x = self._without_top_choices(x, positions)
        keys = [draw_key(p.seed, n) for p, n in zip(self._params, positions, strict=True)]
        return mx.vmap(_categorical)(x, mx.array(keys, mx.uint32)).astype(mx.uint32)

    def _floor(self, x: mx.array) -> mx.array | None:
        """Return the lowest logit [R, 1] kept by top-k, top-p and min-p; `None` if all are off."""
        floor = mx.max(x, axis=-1, keepdims=True) + self._log_min_p if self._has_min_p else None
        for cut in self._cuts:
            lowest = mx.full((x.shape[0], 1), -mx.inf)
            lowest[cut.rows] = _lowest_kept(x[cut.rows], cut.top_k, cut.top_p)
            floor = lowest if floor is None else mx.maximum(floor, lowest)
        return floor

    def _without_top_choices(self, x: mx.array, positions: Sequence[int]) -> mx.array:
        """Exclude all but the least likely token above the threshold, if the coin says so.

        XTC, as its author describes it in text-generation-webui's pull request 6335.
        """
        heads = [
            coin(p.seed, n) < p.xtc_probability
            for p, n in zip(self._params, positions, strict=True)
        ]
        logprobs = x - mx.logsumexp(x, axis=-1, keepdims=True)
        over = logprobs >= self._log_xtc
        ceiling = mx.min(mx.where(over, x, mx.inf), axis=-1, keepdims=True)
        return mx.where(mx.array(heads)[:, None] & over & (x > ceiling), -mx.inf, x)


def _categorical(row: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(row, key=key)


def _lowest_kept(x: mx.array, top_k: Sequence[int], top_p: Sequence[float]) -> mx.array:
    """Return the smallest logit [R, 1] of x [R, V] kept by top-k and then top-p.

    The probability mass is summed over prefixes only, so a row's cut does not depend on the
    width that other rows of the group need.
    """
    width = max(top_k)
    best = x if width == x.shape[-1] else mx.topk(x, width, axis=-1)
    best = -mx.sort(-best, axis=-1)
    k = mx.array(top_k)[:, None]
    weight = mx.exp(best - best[:, :1])
    total = mx.take_along_axis(mx.cumsum(weight, axis=-1), k - 1, axis=-1)
    before = mx.cumsum(weight, axis=-1, inclusive=False)
    kept = (before < mx.array(top_p)[:, None] * total) & (mx.arange(width) < k)
    count = mx.maximum(kept.sum(axis=-1, keepdims=True), 1)
    return mx.take_along_axis(best, count - 1, axis=-1)
