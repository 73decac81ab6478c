"""The control groups of this process on Linux, whose files limit its memory and its processors.

cgroups(7) and proc(5) describe the files. A limit applies to everything below its group, so
the smallest limit between the process's own group and the root counts.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")


class ControlGroup(NamedTuple):
    """A control group of this process.

    Attributes:
        directory: Holds its files.
        version: Of control groups, 1 or 2; the names of the files depend on it.
    """

    directory: Path
    version: int

    def lines(self, name: str) -> list[str]:
        """Return the lines of one of its files; there are none if it cannot be read."""
        return _lines(self.directory / name)


class _Mount(NamedTuple):
    """A hierarchy of control groups.

    Attributes:
        version: Of control groups.
        top: The group that the mount point shows.
        point: The mount point.
    """

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
    """Undo the escaping of spaces in paths under /proc."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
