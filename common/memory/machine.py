"""The memory available to this process: the machine's, or less under control groups."""

import os
from collections.abc import Iterator
from pathlib import Path

from common.control_groups import ControlGroup, control_groups

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
