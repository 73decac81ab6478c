"""Replaces the reference BLAS of MLX's Linux wheel with the system's OpenBLAS."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SONAME = "libopenblas.so.0"
INSTALL_HINT = "sudo apt-get install libopenblas0-pthread (Debian, Ubuntu)"
# "0" keeps MLX's own BLAS.
SWITCH = "MLX_BACKEND_PRELOAD_BLAS"

_NVIDIA = Path("/dev/nvidiactl")
_SYSTEM_PATHS = "/sbin:/usr/sbin:/bin:/usr/bin"
# For processes that compute nothing; one that computes sets its own number.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    # An idle thread sleeps after 2^4 cycles, not after 2^26: others want its core.
    "OPENBLAS_THREAD_TIMEOUT": "4",
}
_KERNELS_VARIABLE = "OPENBLAS_CORETYPE"
# Those of 2004, which it takes for a processor that is newer than itself.
_FALLBACK = "Prescott"
# Faster ones first, with the flags of a processor that they need.
_KERNELS = {
    "SkylakeX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "Haswell": {"avx2", "fma"},
}
_CPU_FACTS = Path("/proc/cpuinfo")


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Tell whether MLX computes on a Linux CPU and the switch is not off."""
    return sys.platform == "linux" and not _NVIDIA.exists() and environment.get(SWITCH, "1") != "0"


def find_openblas() -> Path | None:
    """Return the library found by the dynamic linker, or `None`."""
    try:
        table = subprocess.run(
            ["ldconfig", "-p"],  # noqa: S607 - its place differs
            env={"PATH": _SYSTEM_PATHS},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    except OSError:
        return None
    found = re.search(rf"{re.escape(SONAME)} .*=> (.+)", table)
    return Path(found[1]) if found else None


def preloading(environment: Mapping[str, str], library: Path) -> dict[str, str]:
    """Return the environment variables that make a process load its BLAS from a library."""
    before = environment.get("LD_PRELOAD")
    try:
        kernels = suited_kernels(ctypes.CDLL(str(library)))
    except OSError:
        kernels = {}
    return {
        **_ENVIRONMENT,
        **kernels,
        **environment,
        "LD_PRELOAD": f"{library}:{before}" if before else str(library),
    }


def suited_kernels(
    library: ctypes.CDLL | None = None, facts: Path = _CPU_FACTS
) -> Mapping[str, str]:
    """Return the environment variable that names better kernels than OpenBLAS takes, if any.

    Version 0.3.21, that of Debian 12, multiplies six times as slowly on processors since 2023.

    Args:
        library: OpenBLAS; `None` is that of this process, if it has one.
        facts: Describes the processor.
    """
    if _kernel_name(library or _process()) != _FALLBACK:
        return {}
    try:
        found = re.search(r"^flags\s*:(.*)$", facts.read_text(), re.MULTILINE)
    except OSError:
        return {}
    flags = set(found[1].split()) if found else set()
    best = next((name for name, needed in _KERNELS.items() if needed <= flags), None)
    return {_KERNELS_VARIABLE: best} if best else {}


def attach(library: Path) -> None:
    """Make a library known to this process, which then foresees the products of a server.

    Its own products remain those of the BLAS that it was started with.
    """
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@cache
def _process() -> ctypes.CDLL:
    """Return all that this process knows, now or later; asked in each layer of a pass."""
    return ctypes.CDLL(None)


def has_openblas() -> bool:
    """Tell whether this process knows OpenBLAS, as one does that was started with it."""
    return hasattr(_process(), "openblas_set_num_threads")


def threads() -> int:
    """Return the number of threads for each matrix product; requires `has_openblas`."""
    count: int = _process().openblas_get_num_threads()
    return count


def set_threads(count: int) -> None:
    """Set the number of threads for each matrix product from now on; requires `has_openblas`."""
    _process().openblas_set_num_threads(count)


def kernel_name() -> str:
    """Return OpenBLAS's name of the kernels of this process's products; empty without it."""
    return _kernel_name(_process())


def _kernel_name(library: ctypes.CDLL) -> str:
    if not hasattr(library, "openblas_get_corename"):
        return ""
    library.openblas_get_corename.restype = ctypes.c_char_p
    name: bytes = library.openblas_get_corename()
    return name.decode()


# `CblasRowMajor`, `CblasNoTrans`, `CblasTrans`.
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112


def has_products() -> bool:
    """Tell whether `multiply` works in this process."""
    return hasattr(_process(), "cblas_sgemm")


def multiply(  # noqa: PLR0913 (those of a BLAS)
    inputs: int, matrix: int, outputs: int, *, rows: int, columns: int, width: int, step: int
) -> None:
    """Write the products of float32 rows with those of a matrix; requires `has_products`.

    Args:
        inputs: The address of [rows, width].
        matrix: That of [columns, width].
        outputs: That of the first of `columns` numbers in rows of `step` numbers.
    """
    numbers = map(ctypes.c_int, (_ROW_MAJOR, _PLAIN, _TRANSPOSED, rows, columns, width))
    _process().cblas_sgemm(
        *numbers,
        ctypes.c_float(1.0),
        *(ctypes.c_void_p(inputs), ctypes.c_int(width)),
        *(ctypes.c_void_p(matrix), ctypes.c_int(width)),
        ctypes.c_float(0.0),
        *(ctypes.c_void_p(outputs), ctypes.c_int(step)),
    )
