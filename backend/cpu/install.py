"""Has a process compute on a CPU by this package, on others as they need."""

import logging
import sys

import mlx.core as mx
import numpy as np

from backend.config import CPU_COMPILES_FROM
from backend.cpu.exponentials import LEAST_NUMBERS, exp, log_sum_exp, prepare_gates
from backend.cpu.products import choose_threads, prepare_products, widen_experts
from backend.cpu.whole_attention import attend_part, attend_whole
from backend.model.checkpoint.upstream import Network
from backend.model.device import DEVICE, Device

# The memory is that of the whole machine, and taken again at once.
_TURNS_PER_CLEAR = 32
# Their wheels of MLX compute each exponential by a call of the C library.
_HAS_SLOW_EXPONENTIALS = sys.platform == "linux"

log = logging.getLogger(__name__)


def install(device: Device = DEVICE, kind: mx.Device | None = None) -> None:
    """Give a device the functions of this package if it is a CPU; any other adapts to MLX's facts.

    Call it once in a process, before it loads a model.

    Args:
        device: The functions to replace.
        kind: Metal and CUDA are `mx.gpu`; `None` is the one that MLX computes on.
    """
    if (kind or mx.default_device()) != mx.Device(mx.cpu):
        device.adapt_to(mx.device_info())
        return
    device.blocks_dispatch = True
    device.prepare = _prepare
    device.prepare_training = _prepare_training
    device.choose_threads = choose_threads
    device.sort = _sort
    device.turns_per_clear = _TURNS_PER_CLEAR
    device.compiles_from = CPU_COMPILES_FROM
    if _HAS_SLOW_EXPONENTIALS:
        device.exp = exp
        device.log_sum_exp = log_sum_exp
        device.attend, device.attend_from = attend_whole, LEAST_NUMBERS
        device.attend_part = attend_part


def _sort(numbers: mx.array) -> mx.array:
    """Sort with NumPy's vector instructions, which take a thirtieth of the time of MLX's sort."""
    rows = np.array(numbers)
    rows.sort(axis=-1)
    return mx.array(rows)


def _prepare_training(network: Network) -> None:
    widen_experts(network)
    prepare_products(network, keeps_type=False, dequantises=False)


def _prepare(
    network: Network,
    *,
    keeps_type: bool,
    dequantises: bool = True,
    least_bytes: int | None = None,
) -> None:
    """Prepare a network, and the gates of its family; these have no gradients."""
    if widen_experts(network):
        log.warning("experts need float32 on a CPU: all weights are cast and take more memory")
    prepare_products(
        network, keeps_type=keeps_type, dequantises=dequantises, least_bytes=least_bytes
    )
    if _HAS_SLOW_EXPONENTIALS:
        prepare_gates()
