"""How much memory there is for KV caches beside the weights."""

import logging

import mlx.core as mx

from backend.config import (
    CPU_MEMORY_SHARE,
    CUDA_MEMORY_SHARE,
    MIN_KV_SHARE,
    RESERVE_SHARE,
    ModelOptions,
)
from common.machine_memory import machine_bytes

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
    if options.tuning.memory.max_kv_bytes is not None:
        return options.tuning.memory.max_kv_bytes
    usable = usable_bytes(options, working_set_bytes)
    budget = int((usable - weights_bytes - media_bytes) * (1.0 - RESERVE_SHARE))
    least = least_kv_bytes(usable)
    if budget < least:
        log.warning(
            "the weights take %.1f of %.1f GiB: %.2f GiB are taken for KV caches all the same",
            weights_bytes / 2**30,
            usable / 2**30,
            least / 2**30,
        )
    return max(budget, least)


def usable_bytes(options: ModelOptions, working_set_bytes: int) -> int:
    """Return what the host lets this backend, and with a ledger all of them, take of a device."""
    return int(working_set_bytes * options.memory_utilization)


def least_kv_bytes(usable_bytes: int) -> int:
    """Return the smallest budget that is of use."""
    return int(MIN_KV_SHARE * usable_bytes)


def device_name() -> str:
    """Return what tells the default device from others: backends of one share its memory."""
    info = mx.device_info()
    return str(info.get("uuid") or info.get("device_name") or "")


def working_set_bytes() -> int:
    """Return what the default device can hold without harm to this process or others."""
    info = mx.device_info()
    if recommended := info.get("max_recommended_working_set_size"):
        return int(recommended)
    if total := info.get("total_memory"):
        return int(int(total) * CUDA_MEMORY_SHARE)
    return int(machine_bytes() * CPU_MEMORY_SHARE)
