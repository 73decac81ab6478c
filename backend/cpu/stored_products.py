"""Products with weights as a checkpoint stores them, quantised or in bfloat16, by a kernel in C.

MLX computes them on one thread, and some thirty times as slowly. A few tokens take most of their
time to read weights, of which these are the fewest bytes: a layer that was cast to float32 keeps
them beside, for such passes.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import nn

from backend.cpu.kernels import address, kernels
from backend.cpu.shared_work import product_threads, spread_range
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import STORED
from common import openblas

# More tokens meet dequantised weights, so many of them at once: 16 MiB.
MOST_TOKENS = 16
PIECE_WEIGHTS = 2**22
# The weights of a register are read at once: a group has a multiple of them.
_REGISTER_BYTES = 32
_BITS, _HALF_BITS = (4, 8), 16
_WORD_BITS = 32
# From so many products of two numbers on, threads that wait for work save time.
_LEAST_SHARED = 2**17
_NAMES = ("weight", "scales", "biases")
# The weights of float32 for which stored ones stand, as an attribute of a module.
WIDENED = "widened"

Numbers: TypeAlias = np.ndarray[Any, Any]


def multiply(module: Network, inputs: mx.array) -> mx.array | None:
    """Multiply inputs [..., width] with the weights [outputs, width] of a module.

    It has no gradient.

    Returns:
        `None` if the kernel does not know this form, MLX only traces a function to compile, or
        many tokens have weights of float32 to meet.
    """
    width = inputs.shape[-1]
    is_few = inputs.size <= MOST_TOKENS * width
    if not is_few and (STORED in module or not openblas.has_products()):
        return None
    matrix = _matrix(module, width) if inputs.dtype == mx.float32 else None
    if matrix is None:
        return None
    try:
        vectors = np.ascontiguousarray(np.asarray(inputs))
    except (ValueError, RuntimeError):
        return None
    outputs = np.empty((*vectors.shape[:-1], matrix.form.outputs), np.float32)
    (_multiply_few if is_few else _multiply_many)(matrix, vectors, outputs)
    return mx.array(outputs)


class _Form(ctypes.Structure):
    """A matrix as the kernel reads it; `weights` to `biases` are addresses."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "biases")),
        *((name, ctypes.c_long) for name in ("outputs", "width", "bits", "group")),
    ]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A module's arrays where they lie in memory.

    Attributes:
        weight: Of the module; stored ones stand for these alone.
        arrays: Packed weights [outputs, width * bits / 32] with scales and biases
            [outputs, width / group], or weights of bfloat16 [outputs, width].
        read: The same as the kernel reads them; `form` has their addresses.
    """

    library: ctypes.CDLL
    weight: mx.array
    arrays: Sequence[mx.array]
    read: Sequence[Numbers]
    form: _Form
    address: int

    @classmethod
    def of(cls, library: ctypes.CDLL, module: Network, width: int) -> "_Matrix":
        """Find the arrays of a module that is ready."""
        arrays = [array for name in _NAMES if (array := _source(module).get(name)) is not None]
        read = [_words(array) for array in arrays]
        addresses = [*map(address, read), None, None][: len(_NAMES)]
        is_quantised = len(arrays) > 1
        bits, group = (module.bits, module.group_size) if is_quantised else (_HALF_BITS, width)
        form = _Form(*addresses, len(read[0]), width, bits, group)
        return cls(library, module["weight"], arrays, read, form, ctypes.addressof(form))

    def is_of(self, module: Network, width: int) -> bool:
        """Tell whether a module still has the same arrays, for inputs of this width."""
        if width != self.form.width or module["weight"] is not self.weight:
            return False
        source = _source(module)
        return all(
            source.get(name) is array for name, array in zip(_NAMES, self.arrays, strict=False)
        )


def _source(module: Network) -> Mapping[str, mx.array]:
    """Return the arrays of a module that the kernel reads, by their names."""
    found: Mapping[str, mx.array] = module.get(STORED, module)
    return found


def _words(array: mx.array) -> Numbers:
    """Return an array as NumPy reads it, bfloat16 in words."""
    # An array of our own: `array += 1` would take the memory from under its feet.
    own = array.reshape(array.shape)
    return np.ascontiguousarray(np.asarray(own.view(mx.uint16) if own.itemsize == 2 else own))


def _matrix(module: Network, width: int) -> _Matrix | None:
    """Return the matrix of a module, found once unless its arrays are exchanged."""
    matrix: _Matrix | None = vars(module).get("kernel_matrix")
    if matrix is None or not matrix.is_of(module, width):
        if (library := kernels()) is None or not _is_ready(module, width):
            return None
        module.kernel_matrix = matrix = _Matrix.of(library, module, width)
    return matrix


def stored_form(module: Network) -> Mapping[str, mx.array] | None:
    """Return a layer's arrays for the kernel: weights as they are, if it knows such."""
    weight: mx.array = module["weight"]
    if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        others = {name: module.get(name) for name in _NAMES[1:]}
        wide = {
            name: array.astype(mx.float32) for name, array in others.items() if array is not None
        }
        return {"weight": weight, **wide} if knows(module) else None
    has_blocks = weight.ndim == 2 and weight.shape[1] % (8 * _REGISTER_BYTES // _HALF_BITS) == 0
    return {"weight": weight} if weight.dtype == mx.bfloat16 and has_blocks else None


def knows(module: Network) -> bool:
    """Tell whether the kernel knows how a module is quantised, once its scales are float32."""
    return (
        module.mode == "affine"
        and module.bits in _BITS
        and module.group_size % (8 * _REGISTER_BYTES // module.bits) == 0
        and module.get("global_scale") is None
        and module.get("biases") is not None
    )


def _is_ready(module: Network, width: int) -> bool:
    """Tell whether the kernel can read all of a module's arrays; for others MLX says why not."""
    source = _source(module)
    packed = source["weight"]
    outputs = packed.shape[0]
    if source is not module and module["weight"] is not vars(module)[WIDENED]:
        return False
    if packed.dtype == mx.bfloat16:
        return bool(packed.shape == (outputs, width))
    if source is module and not knows(module):
        return False
    others, groups = (source["scales"], source["biases"]), width // module.group_size
    return (
        {packed.dtype} | {array.dtype for array in others} == {mx.uint32, mx.float32}
        and packed.shape == (outputs, width * module.bits // _WORD_BITS)
        and all(array.shape == (outputs, groups) for array in others)
        and width == groups * module.group_size
    )


def _sorted(matrix: _Matrix, vectors: Numbers) -> tuple[Numbers, Numbers]:
    """Return vectors [..., width] as the kernel multiplies them, and the sums of their groups."""
    inputs, sums = np.empty_like(vectors), np.empty(vectors.size // matrix.form.group, np.float32)
    rows = vectors.size // matrix.form.width
    matrix.library.sort_inputs(matrix.address, *map(address, (vectors, inputs, sums)), rows)
    return inputs, sums


def _multiply_few(matrix: _Matrix, vectors: Numbers, outputs: Numbers) -> None:
    """Fill outputs [..., outputs] with the products of vectors [..., width]."""
    rows, count = vectors.size // matrix.form.width, matrix.form.outputs
    inputs, sums = _sorted(matrix, vectors)
    given = (matrix.address, *map(address, (inputs, sums, outputs)))

    is_worth_it = count * matrix.form.width * rows >= _LEAST_SHARED
    matrix.library.multiply_rows(*given, rows, product_threads() if is_worth_it else 1)


def _multiply_many(matrix: _Matrix, vectors: Numbers, outputs: Numbers) -> None:
    """Do the same with dequantised weights, some of them at a time."""
    count, width = matrix.form.outputs, matrix.form.width
    rows, step = vectors.size // width, max(1, PIECE_WEIGHTS // width)
    piece = np.empty((min(step, count), width), np.float32)
    sorted_inputs, _ = _sorted(matrix, vectors)
    inputs, weights, written = map(address, (sorted_inputs, piece, outputs))

    def dequantise(part: tuple[int, int]) -> None:
        target = weights + (part[0] - first) * width * piece.itemsize
        matrix.library.dequantise(matrix.address, target, *part)

    for first in range(0, count, step):
        last = min(first + step, count)
        spread_range(dequantise, (first, last), width)
        openblas.multiply(
            *(inputs, weights, written + first * piece.itemsize),
            rows=rows,
            columns=last - first,
            width=width,
            step=count,
        )
