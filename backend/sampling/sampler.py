"""One vectorised draw for rows with individual parameters, seeds and positions.

Parameters are arrays, never Python constants of a compiled graph: a new temperature must not
cost a compilation. Temperature is applied first, so top-p and min-p see the distribution that
is drawn from.

Random numbers are pure functions of a request's seed and a position: SplitMix64 (Steele, Lea,
Flood 2014) serves as a hash, so a request draws the same tokens alone, in a batch, and after a
pause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from backend.core.guide import ReplyMatcher
from backend.core.request import SamplingParams

_BLOCK = 64
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_ALL_BUT_SIGN = 0x7FFF_FFFF
_SIGN_SHIFT = 31


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the ids [R, count] of the largest logits, from the largest, and these logits.

    The first ones do not depend on `count`, which is at most V of the float32 logits [R, V].
    """
    rows, vocab_size = logits.shape
    ids = mx.arange(vocab_size)[None]
    if vocab_size > 2 * count * _BLOCK:
        # Each of them lies in one of as many blocks with the largest maxima.
        blocks = _in_blocks(logits)
        peaks = blocks.max(axis=-1)
        chosen, _ = _first(_keys(peaks, mx.arange(peaks.shape[1])[None]), count)
        logits = mx.take_along_axis(blocks, chosen[..., None], axis=1).reshape(rows, -1)
        ids = (chosen[..., None] * _BLOCK + mx.arange(_BLOCK)).reshape(rows, -1)
    return _first(_keys(logits, ids), count)


def _in_blocks(logits: mx.array) -> mx.array:
    """Return logits [R, V] as [R, blocks, block]; the last block may end with -inf."""
    missing = -logits.shape[1] % _BLOCK
    if missing:
        spare = mx.full((logits.shape[0], missing), -mx.inf, logits.dtype)
        logits = mx.concatenate([logits, spare], axis=1)
    return logits.reshape(logits.shape[0], -1, _BLOCK)


def _keys(values: mx.array, ids: mx.array) -> mx.array:
    """Return integers that are larger for larger values, and for smaller ids of equal ones."""
    high = _ordered(mx.view(values, mx.int32)).astype(mx.int64) << _ID_BITS
    return high | (_ID_MASK - ids.astype(mx.int64))


def _first(keys: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the ids and values of the largest keys [R, count], from the largest."""
    keys = keys if keys.shape[1] == count else mx.topk(keys, count, axis=-1)
    keys = mx.sort(keys, axis=-1)[:, ::-1]
    values = mx.view(_ordered((keys >> _ID_BITS).astype(mx.int32)), mx.float32)
    return (_ID_MASK - (keys & _ID_MASK)).astype(mx.int32), values


def _ordered(bits: mx.array) -> mx.array:
    """Turn the bits of float32 numbers into integers of the same order, or back."""
    return bits ^ ((bits >> _SIGN_SHIFT) & _ALL_BUT_SIGN)


_BITS_PER_WORD = 32
_ALL_BITS = -1


class TokenMasks:
    """The masks of a batch; rebuilt whenever its rows change. Belongs to the main thread."""

    def __init__(self, matchers: Sequence[ReplyMatcher | None], vocab_size: int) -> None:
        """Store the matchers of the rows; a row without one allows any token."""
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // _BITS_PER_WORD)
        self._guided = [(row, matcher) for row, matcher in enumerate(matchers) if matcher]
        self._bits = self._blank(len(matchers))
        self._penalties = mx.array(_penalties()) if self._guided else None

    def __bool__(self) -> bool:
        """Whether any row has a matcher."""
        return bool(self._guided)

    def apply(self, logits: mx.array) -> mx.array:
        """Mask the tokens that a grammar forbids in logits [B, V].

        Every matcher must have consumed all tokens of its row.
        """
        if self._penalties is None:
            return logits
        for row, matcher in self._guided:
            matcher.fill_mask(self._bits[row])
        return self._masked(logits, self._bits, self._penalties)

    def apply_all(
        self, logits: mx.array, drafts: Sequence[Sequence[int]], latest: Sequence[int]
    ) -> mx.array:
        """Mask the tokens that a grammar forbids after drafts, in logits [N, V].

        Args:
            logits: After the latest token of each row, after each of its drafts, and others.
            drafts: Drafted tokens of each row, which its grammar allows.
            latest: The index after the latest token of each row; those of its drafts follow.
        """
        if self._penalties is None:
            return logits
        bits = self._blank(len(logits))
        for row, matcher in self._guided:
            matcher.fill_mask(bits[latest[row]])
            for place, token_id in enumerate(drafts[row], start=latest[row] + 1):
                matcher.consume(token_id)
                matcher.fill_mask(bits[place])
            matcher.step_back(len(drafts[row]))
        return self._masked(logits, bits, self._penalties)

    def _blank(self, rows: int) -> NDArray[np.int32]:
        return np.full((rows, self._words), _ALL_BITS, np.int32)

    def _masked(self, logits: mx.array, bits: NDArray[np.int32], table: mx.array) -> mx.array:
        if (bits == _ALL_BITS).all():
            return logits
        # Free rows get zeros: on a CPU, gathering and scattering rows takes six times as long.
        penalties = table[mx.array(bits.view(np.uint16))]
        return logits + penalties.reshape(len(bits), -1)[:, : self._vocab_size]


@cache
def _penalties() -> NDArray[np.float32]:
    """Return the terms that 16 mask bits, lowest first, add to logits: [65536, 16], 4 MB."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    bits = np.unpackbits(halves, axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf))


# Larger than any logit: a penalty or bias beyond it decides no more, and infinity under a mask is
# not a number.
_BEYOND_LOGITS = 1e20


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
        """Count the tokens being fed, [B], then apply penalties and biases to float32 [B, V]."""
        if self.counts is None:
            return logits
        fed = inputs[mx.array(self._rows)]
        self._touch(fed[:, None])
        self.counts = self._counted(self.counts, fed)
        self._lengths = [length + 1 for length in self._lengths]
        return self._adjusted(logits, self._rows, self._of_touched(self.counts))

    def adjust_all(self, logits: mx.array, inputs: Sequence[Sequence[int]]) -> mx.array:
        """Do the same for several positions per row, with logits [N, V]; call `keep` then."""
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
        limit = _BEYOND_LOGITS
        self._penalties = [
            mx.clip(mx.array(values), low, limit)[:, None]
            for low, values in (
                (1.0 / limit, [p.repetition_penalty for p in params]),
                (-limit, [p.presence_penalty for p in params]),
                (-limit, [p.frequency_penalty for p in params]),
            )
        ]
        self.counts, self._bias = mx.array(counts), mx.clip(mx.array(bias), -limit, limit)

    def _counted(
        self, counts: mx.array, inputs: mx.array, fed: Sequence[Sequence[int]] = (), place: int = 0
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


_MASK = (1 << 64) - 1
_COIN_STREAM = 0xA5A5_A5A5


def _draw_key(seed: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit words of the MLX random key for one draw."""
    word = _hashed(seed, position)
    return word >> 32, word & 0xFFFF_FFFF


def _coin(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) that is independent of the draw at this position."""
    return _hashed(seed ^ _COIN_STREAM, position) / 2.0**64


def _hashed(seed: int, position: int) -> int:
    word = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


LowestKept: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""Returns the smallest logit [R, 1] of logits [R, V] that top-p [R, 1] keeps."""


def lowest_kept(logits: mx.array, top_p: mx.array) -> mx.array:
    """Return the smallest logit [R, 1] of logits [R, V] that top-p [R, 1] keeps, by sorting."""
    best = -mx.sort(-logits)
    last = mx.full((len(logits), 1), logits.shape[-1] - 1)
    kept = _before_top_p(best, top_p, last)
    count = mx.maximum(kept.sum(axis=-1, keepdims=True), 1)
    return mx.take_along_axis(best, count - 1, axis=-1)


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
        keys = [_draw_key(p.seed, n) for p, n in zip(self._params, positions, strict=True)]
        return mx.array(keys, mx.uint32)

    def _without_top_choices(
        self, x: mx.array, logprobs: mx.array, positions: Sequence[int]
    ) -> mx.array:
        """Exclude all but the least likely token above the threshold, if the coin says so.

        XTC, as its author describes it in text-generation-webui's pull request 6335.
        """
        heads = [
            _coin(p.seed, n) < p.xtc_probability
            for p, n in zip(self._params, positions, strict=True)
        ]
        over = logprobs >= self._log_xtc
        ceiling = mx.min(mx.where(over, x, mx.inf), axis=-1, keepdims=True)
        return mx.where(mx.array(heads)[:, None] & over & (x > ceiling), -mx.inf, x)


class _DrawFromAll(_Rows):
    """Draws a token for each of some rows without top-k."""

    def __init__(self, params: Sequence[SamplingParams], lowest: LowestKept) -> None:
        super().__init__(params)
        self._lowest_kept = lowest
        cut = [row for row, p in enumerate(params) if p.top_p < 1.0]
        self._cut = mx.array(cut) if cut else None
        self._top_p = _column([params[row].top_p for row in cut])

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
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
        lowest[self._cut] = self._lowest_kept(x[self._cut], self._top_p)
        return lowest if floor is None else mx.maximum(floor, lowest)


class _DrawFromBest(_Rows):
    """Draws a token for each of some rows with top-k; the vocabulary hardly costs time.

    The mass of probability is summed over prefixes only, and noise belongs to a token: so a
    row's draw does not depend on the number of tokens that other rows look at.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        super().__init__(params)
        self._width = max(p.top_k for p in params)
        self._top_k = _column([p.top_k for p in params], mx.int32)
        self._top_p = _column([p.top_p for p in params])

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
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
    """Tell which logits [R, W], from the largest, top-p keeps; `last` is the last that counts."""
    weight = mx.exp(best - best[:, :1])
    total = mx.take_along_axis(mx.cumsum(weight, axis=-1), last, axis=-1)
    return mx.cumsum(weight, axis=-1, inclusive=False) < top_p * total


def _column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(values, dtype)[:, None]


class Sampler:
    """Draws one token per row; rebuilt whenever the rows change. Belongs to the main thread.

    A row's draw does not depend on the other rows.

    Attributes:
        cuts: Whether a draw looks for the smallest logit that top-p keeps.
    """

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, lowest: LowestKept | None = None
    ) -> None:
        """Prepare the draws of some rows.

        Args:
            params: Of each row.
            vocab_size: V.
            lowest: Finds that logit; `None` sorts them.
        """
        drawing = [row for row, p in enumerate(params) if not p.is_greedy]
        best = [row for row in drawing if 0 < params[row].top_k < vocab_size]
        others = [row for row in drawing if row not in best]
        self._count = len(params)
        self._draws: list[tuple[list[int], _DrawFromAll | _DrawFromBest]] = []
        if best:
            self._draws.append((best, _DrawFromBest([params[row] for row in best])))
        if others:
            draw = _DrawFromAll([params[row] for row in others], lowest or lowest_kept)
            self._draws.append((others, draw))
        self.cuts = any(params[row].top_p < 1.0 for row in others)

    def draw(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return token ids [B] for logits [B, V] (float32) after penalties and masks.

        `positions` are the numbers of tokens that the rows have drawn before.
        """
        if self._draws and len(self._draws[0][0]) == self._count:
            return self._draws[0][1](logits, positions)
        tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
        for rows, draw in self._draws:
            places = mx.array(rows)
            tokens[places] = draw(logits[places], [positions[row] for row in rows])
        return tokens
