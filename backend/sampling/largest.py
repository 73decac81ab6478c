"""The largest logits of each row, in one order: by value, and equal ones by token id."""

import mlx.core as mx

_BLOCK = 64
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_ALL_BUT_SIGN = 0x7FFF_FFFF
_SIGN_SHIFT = 31


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the ids [R, count] of the largest logits, from the largest, and these logits.

    The first ones do not depend on `count`.

    Args:
        logits: [R, V] float32.
        count: At most V.
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
