"""Products with weights that stay quantised, by a kernel in C.

MLX computes them on one thread, and some thirty times as slowly. The kernel is compiled once for a
machine, into the temporary directory, as MLX's own kernels are.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx
import numpy as np

from backend.cpu.whole_attention import product_threads, spread
from backend.model.checkpoint.upstream import Network
from common import openblas
from common.directories import others_may_write, own_content, replace_file

SOURCE = Path(__file__).with_suffix(".c")
# More tokens meet dequantised weights, so many of them at once: 16 MiB.
MOST_TOKENS = 16
PIECE_WEIGHTS = 2**22
# The weights of a register are read at once: a group has a multiple of them.
_REGISTER_BYTES = 32
_BITS = (4, 8)
_NAMES = ("weight", "scales", "biases")
# From so many products of two numbers on, a second thread is worth its start.
_LEAST_SPREAD = 2**21
COMPILER_PATH = "/usr/local/bin:/usr/bin:/bin"
_COMPILERS = ("cc", "gcc", "clang")
# Compilers know one of them, by their version and processor.
_TARGETS = ("-march=native", "-mcpu=native")
_FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
COMPILING_S = 60.0
_MOST_BYTES = 2**20
_CPU_FACTS = Path("/proc/cpuinfo")

log = logging.getLogger(__name__)

Numbers: TypeAlias = np.ndarray[Any, Any]


def multiply(module: Network, inputs: mx.array) -> mx.array | None:
    """Multiply inputs [..., width] with the weights [outputs, width] of a module.

    It has no gradient.

    Returns:
        `None` if the kernel does not know this form, or MLX only traces a function to compile.
    """
    width = inputs.shape[-1]
    is_few = inputs.size <= MOST_TOKENS * width
    matrix = _matrix(module, width) if inputs.dtype == mx.float32 else None
    if matrix is None or not (is_few or openblas.has_products()):
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
        arrays: Packed weights [outputs, width * bits / 32], scales and biases
            [outputs, width / group].
        read: The same as the kernel reads them; `form` has their addresses.
    """

    library: ctypes.CDLL
    arrays: Sequence[mx.array]
    read: Sequence[Numbers]
    form: _Form
    address: int

    @classmethod
    def of(cls, library: ctypes.CDLL, module: Network, width: int) -> "_Matrix":
        """Find the arrays of a module that is ready."""
        arrays = [module[name] for name in _NAMES]
        # NumPy reads an array of our own: `array += 1` would take the memory from under its feet.
        read = [np.ascontiguousarray(np.asarray(array.reshape(array.shape))) for array in arrays]
        addresses = map(_address, read)
        form = _Form(*addresses, len(read[0]), width, module.bits, module.group_size)
        return cls(library, arrays, read, form, ctypes.addressof(form))

    def is_of(self, module: Network, width: int) -> bool:
        """Tell whether a module still has the same arrays, for inputs of this width."""
        return width == self.form.width and all(
            module.get(name) is array for name, array in zip(_NAMES, self.arrays, strict=True)
        )


def _matrix(module: Network, width: int) -> _Matrix | None:
    """Return the matrix of a module, found once unless its arrays are exchanged."""
    matrix: _Matrix | None = vars(module).get("kernel_matrix")
    if matrix is None or not matrix.is_of(module, width):
        if (library := _library()) is None or not _is_ready(module, width):
            return None
        module.kernel_matrix = matrix = _Matrix.of(library, module, width)
    return matrix


def knows(module: Network) -> bool:
    """Tell whether the kernel knows how a module is quantised, once its scales are float32."""
    return (
        module.mode == "affine"
        and module.bits in _BITS
        and module.group_size % (8 * _REGISTER_BYTES // module.bits) == 0
        and module.get("global_scale") is None
        and module.get("biases") is not None
    )


def is_available() -> bool:
    """Tell whether the kernel works here; the first call compiles it."""
    return _library() is not None


def _is_ready(module: Network, width: int) -> bool:
    """Tell whether the kernel can read all of a module's arrays; for others MLX says why not."""
    if not knows(module):
        return False
    packed, *others = (module[name] for name in _NAMES)
    outputs, groups = packed.shape[0], width // module.group_size
    return (
        {packed.dtype} | {array.dtype for array in others} == {mx.uint32, mx.float32}
        and packed.shape == (outputs, width * module.bits // 32)
        and all(array.shape == (outputs, groups) for array in others)
        and width == groups * module.group_size
    )


def _sorted(matrix: _Matrix, vectors: Numbers) -> tuple[Numbers, Numbers]:
    """Return vectors [..., width] as the kernel multiplies them, and the sums of their groups."""
    inputs, sums = np.empty_like(vectors), np.empty(vectors.size // matrix.form.group, np.float32)
    rows = vectors.size // matrix.form.width
    matrix.library.sort_inputs(matrix.address, *map(_address, (vectors, inputs, sums)), rows)
    return inputs, sums


def _multiply_few(matrix: _Matrix, vectors: Numbers, outputs: Numbers) -> None:
    """Fill outputs [..., outputs] with the products of vectors [..., width]."""
    rows, count = vectors.size // matrix.form.width, matrix.form.outputs
    inputs, sums = _sorted(matrix, vectors)
    given = (matrix.address, *map(_address, (inputs, sums, outputs)))

    def compute(part: tuple[int, int]) -> None:
        matrix.library.multiply_rows(*given, *part, rows)

    _spread(compute, (0, count), matrix.form.width * rows)


def _multiply_many(matrix: _Matrix, vectors: Numbers, outputs: Numbers) -> None:
    """Do the same with dequantised weights, some of them at a time."""
    count, width = matrix.form.outputs, matrix.form.width
    rows, step = vectors.size // width, max(1, PIECE_WEIGHTS // width)
    piece = np.empty((min(step, count), width), np.float32)
    sorted_inputs, _ = _sorted(matrix, vectors)
    inputs, weights, written = map(_address, (sorted_inputs, piece, outputs))

    def dequantise(part: tuple[int, int]) -> None:
        target = weights + (part[0] - first) * width * piece.itemsize
        matrix.library.dequantise(matrix.address, target, *part)

    for first in range(0, count, step):
        last = min(first + step, count)
        _spread(dequantise, (first, last), width)
        openblas.multiply(
            *(inputs, weights, written + first * piece.itemsize),
            rows=rows,
            columns=last - first,
            width=width,
            step=count,
        )


def _spread(
    compute: Callable[[tuple[int, int]], None], outputs: tuple[int, int], products: int
) -> None:
    """Compute a range of outputs, on several threads if it takes long.

    Args:
        products: What each output takes.
    """
    first, last = outputs
    if (last - first) * products < _LEAST_SPREAD:
        compute(outputs)
        return
    edges = np.linspace(first, last, 1 + product_threads(), dtype=int)
    spread(compute, list(pairwise(edges.tolist())))


def _address(array: Numbers) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _library() -> ctypes.CDLL | None:
    started = time.monotonic()
    try:
        library = load_kernel()
    except (OSError, subprocess.SubprocessError) as error:
        log.info("quantised weights are multiplied by MLX, many times slower: %s", error)
        return None
    log.info("the kernel for quantised weights is ready after %.1f s", time.monotonic() - started)
    return library


def load_kernel(
    temporary: Path | None = None, path: str = COMPILER_PATH, seconds: float = COMPILING_S
) -> ctypes.CDLL:
    """Return the kernel, compiled for this processor unless an earlier process has done so.

    Args:
        temporary: The directory for temporary files unless it is that of this process.
        path: Where a compiler may be.
        seconds: How long it may take.

    Raises:
        OSError: There is none, or it failed.
        subprocess.TimeoutExpired: It took too long.
    """
    with _private_directory(temporary or Path(tempfile.gettempdir())) as directory:
        kernel = directory / f"quantised-{_digest()}.so"
        if _is_whole(kernel):
            return _opened(kernel)
        with tempfile.TemporaryDirectory(dir=directory) as place:
            part = Path(place) / kernel.name
            _compile(part, path, seconds)
            library = _opened(part)
            replace_file(kernel, _sealed(part.read_bytes()))
    return library


def _opened(kernel: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(kernel))
    try:
        library.sort_inputs.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_long]
        library.multiply_rows.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 3]
        library.dequantise.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 2]
    except AttributeError as error:
        raise OSError(f"the compiler wrote another library: {error}") from error
    for function in (library.sort_inputs, library.multiply_rows, library.dequantise):
        function.restype = None
    return library


def _sealed(library: bytes) -> bytes:
    """Return a library with its digest at the end, which the linker does not read."""
    return library + hashlib.sha256(library).digest()


def _is_whole(kernel: Path) -> bool:
    """Tell whether this user wrote a file as `_sealed`: a part of a library ends its process."""
    try:
        content = own_content(kernel, _MOST_BYTES)
    except (OSError, ValueError):
        return False
    return content == _sealed(content[: -hashlib.sha256().digest_size])


@contextmanager
def _private_directory(temporary: Path) -> Iterator[Path]:
    """Yield a directory, or one that is removed afterwards if others may write there."""
    if not others_may_write(temporary.stat()):
        yield temporary
        return
    with tempfile.TemporaryDirectory() as own:
        yield Path(own)


def _compile(part: Path, path: str, seconds: float) -> None:
    found = (shutil.which(name, path=path) for name in _COMPILERS)
    compiler = next(filter(None, found), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc)")
    for target in _TARGETS:
        command = [compiler, *_FLAGS, target, "-o", str(part), str(SOURCE)]
        problem = _run(command, part.parent, seconds)
        if problem is None:
            return
    raise OSError(f"{compiler} failed: {problem}")


def _run(command: list[str], temporary: Path, seconds: float) -> str | None:
    """Run a compiler; return the end of its message if it failed.

    Raises:
        subprocess.TimeoutExpired: It took too long, and was killed.
    """
    with subprocess.Popen(  # noqa: S603 (a compiler of the system)
        command,
        env={"PATH": COMPILER_PATH, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=seconds)
        except BaseException:
            # A compiler has children, which would go on.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return said.strip()[-200:] if process.returncode else None


def _digest() -> str:
    """Return a name for this source on this kind of processor."""
    facts = ""
    with suppress(OSError):
        facts = _CPU_FACTS.read_text()
    kind = re.findall(r"^(?:model name|flags|Features)\s*:.*$", facts, re.MULTILINE)[:2]
    named = "\n".join((platform.machine(), *kind, *_FLAGS)).encode()
    return hashlib.sha256(SOURCE.read_bytes() + named).hexdigest()[:16]
