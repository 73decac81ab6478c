"""The memory of this process and its machine: limits of control groups, garbage, heaps."""

import asyncio
import ctypes
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")


class ControlGroup(NamedTuple):
    """A control group of this process; its version, 1 or 2, decides the names of its files."""

    directory: Path
    version: int

    def lines(self, name: str) -> list[str]:
        """Return the lines of one of its files; there are none if it cannot be read."""
        return _lines(self.directory / name)


class _Mount(NamedTuple):
    """A hierarchy of control groups, and the group `top` that its mount point shows."""

    version: int
    top: PurePosixPath
    point: PurePosixPath


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield this process's own group and all visible ones above it.

    Args:
        controller: `memory` or `cpu`; version 1 has a hierarchy for each.
        root: Directory that contains `proc` and the mount points.
    """
    paths = _own_paths(controller, root)
    for mount in _mounts(controller, root):
        path = paths.get(mount.version)
        if path is not None:
            for directory in _directories(root, mount, path):
                yield ControlGroup(directory, mount.version)


def _own_paths(controller: str, root: Path) -> dict[int, PurePosixPath]:
    """Return this process's group by the version of its hierarchy."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = PurePosixPath(path)
        elif controller in controllers.split(","):
            paths[1] = PurePosixPath(path)
    return paths


def _mounts(controller: str, root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        about, _, rest = line.partition(" - ")
        _, _, _, top, point, *_ = about.split(" ")
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            version = 2 if kind == "cgroup2" else 1
            yield _Mount(version, PurePosixPath(_unescaped(top)), PurePosixPath(_unescaped(point)))


def _directories(root: Path, mount: _Mount, path: PurePosixPath) -> Iterator[Path]:
    below = PurePosixPath()
    if path.is_relative_to(mount.top) and ".." not in path.parts:
        below = path.relative_to(mount.top)
    point = root / mount.point.relative_to("/")
    for part in (below, *below.parents):
        yield point / part


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


# The limit that gets the group killed, and the one that throttles it to a standstill.
_FILES = {2: ("memory.max", "memory.high"), 1: ("memory.limit_in_bytes",)}


def machine_bytes(root: Path = Path("/")) -> int:
    """Return the physical memory, or this process's smallest control group limit, in bytes.

    Args:
        root: Directory that contains `proc` and the mount points.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups = control_groups("memory", root)
    return min([physical, *(limit for group in groups for limit in _limits(group))])


def _limits(group: ControlGroup) -> Iterator[int]:
    for name in _FILES[group.version]:
        for text in group.lines(name):
            if text.isdecimal():
                yield int(text)
    for line in group.lines("memory.stat") if group.version == 1 else ():
        # Version 1 reports the smallest limit above, including groups hidden from a container.
        name, _, number = line.partition(" ")
        if name == "hierarchical_memory_limit":
            yield int(number)


def resident_bytes(process_id: int) -> int:
    """Return the physical memory of a process in bytes; 0 where the system does not say (macOS)."""
    try:
        pages = Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def in_words(size_bytes: int) -> str:
    """Return a size for a reader, in the decimal units of the command line."""
    megabytes = size_bytes / 1e6
    return f"{megabytes:,.1f} MB" if megabytes < 1000 else f"{megabytes / 1000:,.2f} GB"


class LastingObjects:
    """Excludes long-lived objects from garbage collection, and includes them again.

    The collector has one set of frozen objects per process. If the embedding program uses it,
    it is left alone, and collections are short anyway.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._is_theirs = False

    def leave_out(self) -> None:
        """Exclude all present objects, apart from garbage."""
        if self._is_free():
            gc.collect()
            gc.freeze()
            self._is_ours = True

    def leave_out_at_once(self) -> None:
        """Exclude all present objects, including garbage: this does not stop any thread."""
        if self._is_free():
            gc.freeze()
            self._is_ours = True

    def collect(self) -> None:
        """Collect all garbage, also among the excluded objects."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False
        gc.collect()

    def _is_free(self) -> bool:
        if not (self._is_ours or self._is_theirs):
            # This counts one object after another.
            self._is_theirs = gc.get_freeze_count() > 0
        return not self._is_theirs


LASTING = LastingObjects()


# By then an ended call holds no memory.
TRIM_DELAY_S = 1.0
# glibc creates up to eight per core, and free memory of one heap serves no thread of another.
HEAPS = 2
_M_ARENA_MAX = -8


class Heap:
    """Returns freed memory to the system from time to time; belongs to an event loop."""

    def __init__(self) -> None:
        self._is_due = False

    def trim_soon(self) -> None:
        """Schedule a trim on a thread; calls before it runs share it."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim)


def trim() -> bool:
    """Return freed memory to the system, where glibc keeps it; false elsewhere."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and bool(malloc_trim(0))


def share_heaps() -> bool:
    """Have all threads of this process share two heaps where it is glibc's; false elsewhere.

    Call it before there are threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, HEAPS))
