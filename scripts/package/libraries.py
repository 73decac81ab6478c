"""Shared libraries in the package, on Linux: those that its Python links, and OpenBLAS."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

OPENBLAS = "libopenblas.so.0"

# Part of every Linux with a glibc, and not to be mixed with another one's.
OF_THE_SYSTEM = re.compile(
    r"(ld-linux|libc|libm|libdl|librt|libpthread|libresolv|libnsl|libutil|libstdc\+\+|libgcc_s)\b"
)
LINKED = re.compile(r"^\s*(\S+) => (/\S+) \(", re.MULTILINE)


def bring_libraries(python: Path, destination: Path) -> None:
    """Copy the libraries of a Python installation and OpenBLAS into one directory, by name.

    On systems other than Linux nothing is copied: their standalone Pythons contain all.
    """
    if platform.system() != "Linux":
        return
    needed = linked_by([python / "bin" / "python3", *python.rglob("*.so")])
    openblas = find_openblas()
    if openblas is not None:
        needed = {**needed, OPENBLAS: openblas, **linked_by([openblas])}
    destination.mkdir()
    for name, path in needed.items():
        shutil.copy(path, destination / name)


def linked_by(objects: Iterable[Path]) -> Mapping[str, Path]:
    """Return the libraries that objects link, directly or not, except the system's own."""
    return {
        name: path
        for linked in objects
        for name, path in _linked(linked)
        if not OF_THE_SYSTEM.match(name)
    }


def find_openblas() -> Path | None:
    """Return this machine's OpenBLAS, or `None`."""
    table = _output("ldconfig", "-p")
    found = re.search(rf"{re.escape(OPENBLAS)} .*=> (\S+)", table)
    return Path(found[1]) if found else None


def _linked(linked: Path) -> Iterator[tuple[str, Path]]:
    for name, path in LINKED.findall(_output("ldd", str(linked))):
        yield name, Path(path)


def _output(*command: str) -> str:
    """Return the output of a system tool; ldd fails on files that link nothing."""
    found = shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin")
    done = subprocess.run(  # noqa: S603 - a tool of the system
        [found or command[0], *command[1:]], capture_output=True, text=True, check=False
    )
    return done.stdout
