"""How much memory there is for KV caches beside the weights."""

import logging
import os
from pathlib import Path

import mlx.core as mx

from backend.config import (
    CPU_MEMORY_SHARE,
    CUDA_MEMORY_SHARE,
    MIN_KV_SHARE,
    RESERVE_SHARE,
    ModelOptions,
)

# Of cgroup 2, then of cgroup 1.
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

log = logging.getLogger(__name__)


def kv_budget_bytes(
    options: ModelOptions, weights_bytes: int, working_set_bytes: int, *, media_bytes: int = 0
) -> int:
    """Return what the KV caches of running requests and of the prompt cache may take together.

    Args:
        options: What the host asks for.
        weights_bytes: What the weights take.
        working_set_bytes: What the device can hold without harm.
        media_bytes: What remembered media may take.
    """
    if options.tuning.max_kv_bytes is not None:
        return options.tuning.max_kv_bytes
    usable = int(working_set_bytes * options.memory_utilization)
    budget = int((usable - weights_bytes - media_bytes) * (1.0 - RESERVE_SHARE))
    least = int(MIN_KV_SHARE * working_set_bytes)
    if budget < least:
        log.warning(
            "the weights take %.1f of %.1f GiB: %.2f GiB are taken for KV caches all the same",
            weights_bytes / 2**30,
            usable / 2**30,
            least / 2**30,
        )
    return max(budget, least)


def working_set_bytes() -> int:
    """Return what the default device can hold without harm to this process or others."""
    info = mx.device_info()
    if recommended := info.get("max_recommended_working_set_size"):
        return int(recommended)
    if total := info.get("total_memory"):
        return int(int(total) * CUDA_MEMORY_SHARE)
    return int(machine_bytes() * CPU_MEMORY_SHARE)


def machine_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """Return the physical memory, or what a container leaves of it.

    Args:
        limits: Files that may hold a smaller number.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *filter(None, map(_limit, limits))])


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
