"""The memory available to this process: the machine's, or less under control groups.

cgroups(7) and proc(5) describe the files. A limit applies to everything below its group, so
the smallest limit between the process's own group and the root counts.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")
# The limit that gets the group killed, and the one that throttles it to a standstill.
_LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}


class _Mount(NamedTuple):
    """A control group hierarchy that limits memory.

    Attributes:
        kind: `cgroup` (version 1) or `cgroup2`.
        top: The group that the mount point shows.
        point: The mount point.
    """

    kind: str
    top: PurePosixPath
    point: PurePosixPath


def machine_bytes(root: Path = Path("/")) -> int:
    """Return the physical memory, or this process's smallest control group limit, in bytes.

    Args:
        root: Directory that contains `proc` and the mount points.
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
    """Return this process's group by kind of hierarchy."""
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
    """Return the directories of a group and of all visible groups above it."""
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
        # Version 1 reports the smallest limit above, including groups hidden from a container.
        name, _, number = line.partition(" ")
        if name == "hierarchical_memory_limit":
            yield int(number)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    """Undo the escaping of spaces in paths under /proc."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
