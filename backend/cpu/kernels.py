"""Kernels in C, compiled once for a machine into the temporary directory, beside MLX's own."""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt

from common.directories import NAME, make_private, others_may_write, own_content, replace_file

SOURCES = tuple(
    Path(__file__).with_name(f"{name}.c")
    for name in ("stored_products", "attention", "tokenwise", "threads")
)
_HEADERS = tuple(Path(__file__).with_name(f"{name}.h") for name in ("registers", "threads"))
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_long
_FUNCTIONS = {
    "sort_inputs": [*[_ADDRESS] * 4, _NUMBER],
    "multiply_rows": [*[_ADDRESS] * 4, *[_NUMBER] * 2],
    "dequantise": [*[_ADDRESS] * 2, *[_NUMBER] * 2],
    "attend": [_ADDRESS, *[_NUMBER] * 2, _ADDRESS],
    "normalise": [*[_ADDRESS] * 4, *[_NUMBER] * 3, ctypes.c_double, _NUMBER],
    "open_gates": [*[_ADDRESS] * 3, *[_NUMBER] * 3],
    "rotate": [*[_ADDRESS] * 3, *[_NUMBER] * 8],
}
COMPILER_PATH = "/usr/local/bin:/usr/bin:/bin"
_COMPILERS = ("cc", "gcc", "clang")
# Compilers know one of them, by their version and processor.
_TARGETS = ("-march=native", "-mcpu=native")
_FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
COMPILING_S = 60.0
_MOST_BYTES = 2**20
_CPU_FACTS = Path("/proc/cpuinfo")

Numbers: TypeAlias = npt.NDArray[Any]

log = logging.getLogger(__name__)


def address(array: Numbers) -> int:
    """Return where the numbers of an array lie, which must outlive their use."""
    found: int = array.__array_interface__["data"][0]
    return found


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the kernels, or `None` if they do not work here; the first call compiles them."""
    started = time.monotonic()
    try:
        library = load_kernels()
    except (OSError, subprocess.SubprocessError) as error:
        log.info(
            "quantised weights and attention take many times as long without kernels in C: %s",
            error,
        )
        return None
    log.info("the kernels in C are ready after %.1f s", time.monotonic() - started)
    return library


def load_kernels(
    temporary: Path | None = None, path: str = COMPILER_PATH, seconds: float = COMPILING_S
) -> ctypes.CDLL:
    """Return the kernels, compiled for this processor unless an earlier process has done so.

    Args:
        temporary: The directory for temporary files unless it is that of this process.
        path: Where a compiler may be.
        seconds: How long it may take.

    Raises:
        OSError: There is none, or it failed.
        subprocess.TimeoutExpired: It took too long.
    """
    with _private_directory(temporary or Path(tempfile.gettempdir())) as directory:
        kernel = directory / f"kernels-{_digest()}.so"
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
        functions = {name: getattr(library, name) for name in _FUNCTIONS}
    except AttributeError as error:
        raise OSError(f"the compiler wrote another library: {error}") from error
    for name, function in functions.items():
        function.argtypes, function.restype = _FUNCTIONS[name], None
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
    """Yield a directory, or a part of it that is this user's if others may write there.

    Without such a part, one that is removed afterwards.
    """
    if not others_may_write(temporary.stat()):
        yield temporary
        return
    own = temporary / f"{NAME}-kernels-{os.geteuid()}"
    with ExitStack() as until_used:
        try:
            make_private(own)
        except OSError:
            own = Path(until_used.enter_context(tempfile.TemporaryDirectory()))
        yield own


def _compile(part: Path, path: str, seconds: float) -> None:
    found = (shutil.which(name, path=path) for name in _COMPILERS)
    compiler = next(filter(None, found), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc)")
    for target in _TARGETS:
        command = [compiler, *_FLAGS, target, "-o", str(part), *map(str, SOURCES)]
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
        process_group=0,
    ) as process:
        try:
            _, said = process.communicate(timeout=seconds)
        except BaseException:
            # A compiler has children, which would go on.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return said.strip()[-200:] if process.returncode else None


def _digest() -> str:
    """Return a name for these sources on this kind of processor."""
    facts = ""
    with suppress(OSError):
        facts = _CPU_FACTS.read_text()
    kind = re.findall(r"^(?:model name|flags|Features)\s*:.*$", facts, re.MULTILINE)[:2]
    named = "\n".join((platform.machine(), *kind, *_FLAGS)).encode()
    sources = b"".join(source.read_bytes() for source in (*_HEADERS, *SOURCES))
    return hashlib.sha256(sources + named).hexdigest()[:16]


_LIBRARIES = "mlx/*/cpu/*.so"
_ELF = b"\x7fELF"
# A 64-bit header of ELF: where the table of sections is, the size of an entry, and their number.
_ELF_BYTES = 64
_TABLE_OFFSET = struct.Struct("<40xQ10xHH")
_TYPE = struct.Struct("<4xI")
# Another process may be writing it.
_LINKING_S = 3.0
_POLL_S = 0.1


def remove_damaged_graphs(directory: Path) -> None:
    """Remove the damaged libraries in a directory for temporary files, which are compiled again.

    MLX compiles graphs with the system's compiler, and loads a library from then on wherever a file
    has its name. One whose linker was killed, or that a full disk cut, would end every later load.
    """
    for library in directory.glob(_LIBRARIES):
        try:
            if _becomes_whole(library):
                continue
            library.unlink()
        except OSError as error:
            log.warning("a compiled graph cannot be looked at: %s", error)
        else:
            log.warning("%s was damaged: MLX compiles it again", library.name)


def _becomes_whole(library: Path) -> bool:
    deadline = library.stat().st_mtime + _LINKING_S
    while not _is_whole_graph(library):
        if not 0 < deadline - time.time() <= _LINKING_S:
            return False
        time.sleep(_POLL_S)
    return True


def _is_whole_graph(library: Path) -> bool:
    """Tell whether a file is a library up to the last entry of its sections, which is its end."""
    with library.open("rb") as file:
        header = file.read(_ELF_BYTES)
        if header[:4] != _ELF or len(header) < _ELF_BYTES:
            # macOS has another form, and no such file is empty.
            return bool(header.strip(b"\0")) and header[:4] != _ELF
        offset, entry_bytes, count = _TABLE_OFFSET.unpack_from(header)
        file.seek(offset + entry_bytes * (count - 1))
        entry = file.read(entry_bytes)
    return len(entry) == entry_bytes and bool(_TYPE.unpack_from(entry)[0])
