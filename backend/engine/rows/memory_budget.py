"""The memory for KV caches, after the weights."""

import logging

import mlx.core as mx

from backend.config import (
    CPU_MEMORY_SHARE,
    CUDA_MEMORY_SHARE,
    MIN_KV_SHARE,
    RESERVE_SHARE,
    ModelOptions,
)
from common.memory.machine import machine_bytes

log = logging.getLogger(__name__)


def kv_budget_bytes(
    options: ModelOptions, weights_bytes: int, working_set_bytes: int, *, media_bytes: int = 0
) -> int:
    """Return the memory for the KV caches of running requests and the prompt cache together.

    Args:
        options: The host's options.
        weights_bytes: The size of the weights.
        working_set_bytes: The memory that the device can hold without harm.
        media_bytes: The maximum size of remembered media.
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
    """Return the host's memory limit for this backend, and with a ledger for all of them."""
    return int(working_set_bytes * options.memory_utilization)


def least_kv_bytes(usable_bytes: int) -> int:
    """Return the smallest useful budget."""
    return int(MIN_KV_SHARE * usable_bytes)


def device_name() -> str:
    """Return an id of the default device: backends on one device share its memory."""
    info = mx.device_info()
    return str(info.get("uuid") or info.get("device_name") or "")


def working_set_bytes() -> int:
    """Return the memory that the default device can hold without harm to any process."""
    info = mx.device_info()
    if recommended := info.get("max_recommended_working_set_size"):
        return int(recommended)
    if total := info.get("total_memory"):
        return int(int(total) * CUDA_MEMORY_SHARE)
    return int(machine_bytes() * CPU_MEMORY_SHARE)
