"""The processor cores available to this process."""

import os
from collections.abc import Iterator
from pathlib import Path

from common.control_groups import ControlGroup, control_groups


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process can keep busy, at least one.

    These are the cores that it may run on, or fewer if a control group limits its time on them.

    Args:
        root: Directory that contains `proc` and the mount points.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    groups = control_groups("cpu", root)
    shares = (share for group in groups for share in _shares(group))
    return max(1, int(min([allowed or 1, *shares])))


def _shares(group: ControlGroup) -> Iterator[float]:
    """Yield the limit of a group in cores, if it has one."""
    if group.version == 2:
        words = [word for line in group.lines("cpu.max") for word in line.split()]
    else:
        words = [*group.lines("cpu.cfs_quota_us"), *group.lines("cpu.cfs_period_us")]
    # Without a limit the first word is `max` or -1.
    if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]) > 0:
        yield int(words[0]) / int(words[1])
