"""The memory that this process may use: the machine's, or what its control groups leave of it.

cgroups(7) and proc(5) describe the files. A limit holds for everything below the group that has
it, so the smallest on the path from the process's own group to the root counts.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")
# What kills a process of the group, and what slows it down until it cannot be used.
_LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}


class _Mount(NamedTuple):
    """A hierarchy of control groups that bounds memory.

    Attributes:
        kind: `cgroup` (version 1) or `cgroup2`.
        top: Which group the mount point shows.
        point: Where it is mounted.
    """

    kind: str
    top: PurePosixPath
    point: PurePosixPath


def machine_bytes(root: Path = Path("/")) -> int:
    """Return the physical memory, or the smallest limit of a control group of this process.

    Args:
        root: The directory that holds `proc` and the mount points.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    paths = _own_paths(root)
    for mount in _mounts(root):
        path = paths.get(mount.kind)
        if path is not None:
            for group in _groups(root, mount, path):
                yield from _limits_of(group, mount.kind)


def _own_paths(root: Path) -> dict[str, PurePosixPath]:
    """Return the group of this process by kind of hierarchy."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(path)
    return paths


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        about, _, rest = line.partition(" - ")
        _, _, _, top, point, *_ = about.split(" ")
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield _Mount(kind, PurePosixPath(_unescaped(top)), PurePosixPath(_unescaped(point)))


def _groups(root: Path, mount: _Mount, path: PurePosixPath) -> Iterator[Path]:
    """Return the directories of a group and of all above it that can be seen."""
    below = PurePosixPath()
    if path.is_relative_to(mount.top) and ".." not in path.parts:
        below = path.relative_to(mount.top)
    point = root / mount.point.relative_to("/")
    for part in (below, *below.parents):
        yield point / part


def _limits_of(group: Path, kind: str) -> Iterator[int]:
    for name in _LIMITS[kind]:
        for text in _lines(group / name):
            if text.isdecimal():
                yield int(text)
    for line in _lines(group / "memory.stat") if kind == "cgroup" else ():
        # Version 1 tells the smallest limit above, also of groups that a container cannot see.
        name, _, number = line.partition(" ")
        if name == "hierarchical_memory_limit":
            yield int(number)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    """Undo what /proc does to spaces in paths."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
