"""Computations of each token alone, by kernels in C: norms, rotations and gates.

On a Linux CPU, MLX 0.32 makes up to ten small operations of each, and has another thread compute
them one by one. Next to a product by our kernel, that takes longer than the product.
"""

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from backend.cpu.kernels import address, kernels
from backend.cpu.shared_work import product_threads

Numbers: TypeAlias = npt.NDArray[np.float32]
Function: TypeAlias = Callable[..., mx.array]

# Activations, as the kernel knows them.
SILU, GELU = 0, 1
_LANES = 8
_MATRIX_AXES = 2
# Of fewer numbers, a second thread takes longer to be told.
_LEAST_SHARED = 2**16
# Groups of rows that are rotated in turns, times the rotations of a model.
_TABLES = 8

# MLX's own functions that are computed here, by their names; empty before `prepare_tokenwise`.
UPSTREAM: dict[str, Function] = {}


def prepare_tokenwise() -> None:
    """Have MLX's functions of single tokens computed here from now on; cheap if they are."""
    for name, route in _ROUTES.items():
        if name not in UPSTREAM:
            UPSTREAM[name] = upstream = getattr(mx.fast, name)
            setattr(mx.fast, name, wraps(upstream)(route(upstream)))


def open_gates(kind: int, gates: mx.array, inputs: mx.array | None = None) -> mx.array | None:
    """Return an activation of gates [..., N], times inputs; `None` if the kernel cannot.

    It needs `prepare_tokenwise`.
    """
    if gates.size % _LANES or (inputs is not None and inputs.shape != gates.shape):
        return None
    if (read := _read(gates, inputs)) is None:
        return None
    outputs = np.empty_like(read[0])
    _library().open_gates(*_addresses(*read, outputs), gates.size, kind, _parts(gates.size))
    return mx.array(outputs)


def _rms_norm(upstream: Function) -> Function:
    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **more: object) -> mx.array:
        found = None if more else _normalise(x, weight, None, eps, is_centred=False)
        return upstream(x, weight, eps, **more) if found is None else found

    return rms_norm


def _layer_norm(upstream: Function) -> Function:
    def layer_norm(
        x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **more: object
    ) -> mx.array:
        found = None if more else _normalise(x, weight, bias, eps, is_centred=True)
        return upstream(x, weight, bias, eps, **more) if found is None else found

    return layer_norm


def _normalise(
    inputs: mx.array,
    weights: mx.array | None,
    biases: mx.array | None,
    epsilon: float,
    *,
    is_centred: bool,
) -> mx.array | None:
    """Return normalised inputs [..., width]; `None` if the kernel does not know this form."""
    width, others = inputs.shape[-1], (weights, biases)
    if width % _LANES or any(each is not None and each.shape != (width,) for each in others):
        return None
    if (read := _read(inputs, *others)) is None:
        return None
    outputs = np.empty_like(read[0])
    sizes = inputs.size // width, width
    _library().normalise(
        *_addresses(*read, outputs), *sizes, is_centred, epsilon, _parts(inputs.size)
    )
    return mx.array(outputs)


class _Angles(NamedTuple):
    """The arguments of the rotations of a pass, as plain values.

    Attributes:
        offsets: The positions before those of the rows: of one for all, or of each.
    """

    dims: int
    traditional: bool
    base: float | None
    scale: float
    offsets: tuple[int, ...]
    tokens: int


class _Tables:
    """The sines and cosines of the latest rotations, which all layers of a pass share."""

    def __init__(self, upstream: Function) -> None:
        self._upstream = upstream
        self._latest: deque[tuple[_Angles, mx.array | None, Numbers]] = deque(maxlen=_TABLES)

    def find(self, angles: _Angles, freqs: mx.array | None) -> Numbers:
        """Return the table [rows or 1, tokens, dims] of MLX's own rotation."""
        for known, frequencies, table in tuple(self._latest):
            if known == angles and frequencies is freqs:
                return table
        table = self._computed(angles, freqs)
        self._latest.appendleft((angles, freqs, table))
        return table

    def _computed(self, angles: _Angles, freqs: mx.array | None) -> Numbers:
        """Rotate pairs of 1 and 0: they become cosines and sines."""
        dims = angles.dims
        is_first = np.arange(dims) % 2 == 0 if angles.traditional else np.arange(dims) < dims // 2
        shape = (len(angles.offsets), 1, angles.tokens, dims)
        ones = mx.broadcast_to(mx.array(is_first.astype(np.float32)), shape)
        form = {name: getattr(angles, name) for name in ("traditional", "base", "scale")}
        rotated = self._upstream(ones, dims, **form, offset=mx.array(angles.offsets), freqs=freqs)
        return np.ascontiguousarray(np.asarray(rotated))


def _rope(upstream: Function) -> Function:
    tables = _Tables(upstream)

    def rope(a: mx.array, dims: int, **form: Any) -> mx.array:  # noqa: ANN401 (those of MLX)
        found = None if "stream" in form else _rotate(tables, a, dims, **form)
        return upstream(a, dims, **form) if found is None else found

    return rope


def _rotate(  # noqa: PLR0913 (those of MLX)
    tables: _Tables,
    inputs: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
) -> mx.array | None:
    """Return rotated inputs [rows, ..., tokens, width]; `None` if the kernel cannot."""
    if inputs.ndim <= _MATRIX_AXES or (read := _read(inputs)) is None:
        return None
    rows, *heads, tokens, width = inputs.shape
    # By value: some caches add to the same array.
    offsets = tuple(np.asarray(offset).reshape(-1).tolist())
    # MLX reports wrong numbers of a checkpoint; the kernel would read beyond the arrays.
    if dims % 2 or not 0 < dims <= width or len(offsets) not in (1, rows):
        return None
    table = tables.find(_Angles(dims, traditional, base, scale, offsets, tokens), freqs)
    outputs = np.empty_like(read[0])
    sizes = rows, math.prod(heads), tokens, width, dims
    table_row = tokens * dims if len(offsets) > 1 else 0
    _library().rotate(
        *_addresses(*read, table, outputs),
        *(*sizes, table_row, traditional, _parts(inputs.size)),
    )
    return mx.array(outputs)


_ROUTES = {"rms_norm": _rms_norm, "layer_norm": _layer_norm, "rope": _rope}


def _read(inputs: mx.array, *others: mx.array | None) -> Sequence[Numbers | None] | None:
    """Return arrays as a kernel reads them; `None` if it cannot, or while MLX traces a function."""
    arrays = (inputs, *others)
    if not inputs.size or any(each is not None and each.dtype != mx.float32 for each in arrays):
        return None
    try:
        return [None if each is None else np.ascontiguousarray(each) for each in arrays]
    except (ValueError, RuntimeError):
        return None


def _addresses(*arrays: Numbers | None) -> list[int | None]:
    return [None if each is None else address(each) for each in arrays]


def _parts(numbers: int) -> int:
    return product_threads() if numbers >= _LEAST_SHARED else 1


def _library() -> ctypes.CDLL:
    """Return the kernels, without which `prepare_tokenwise` is not called."""
    return cast(ctypes.CDLL, kernels())
