"""Has a process compute on a CPU by this package, on others as they need."""

import logging
import sys
import tempfile
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from backend.config import CPU_COMPILES_FROM
from backend.cpu.exponentials import LEAST_NUMBERS, exp, log_sum_exp, prepare_gates
from backend.cpu.kernels import kernels, remove_damaged_graphs
from backend.cpu.products import choose_threads, prepare_products, widen_experts
from backend.cpu.shared_work import spread
from backend.cpu.whole_attention import attend_part, attend_quantised, attend_whole
from backend.model import cuda
from backend.model.checkpoint.upstream import Network
from backend.model.device import DEVICE, Device

# The memory is that of the whole machine, and taken again at once.
_TURNS_PER_CLEAR = 32
# Their wheels of MLX compute each exponential by a call of the C library.
_HAS_SLOW_EXPONENTIALS = sys.platform == "linux"

_Numbers: TypeAlias = npt.NDArray[np.float32]

log = logging.getLogger(__name__)


def install(device: Device = DEVICE, kind: mx.Device | None = None) -> None:
    """Give a device the functions of this package if it is a CPU; any other adapts to MLX's facts.

    CUDA gets the attention of `backend.model.cuda`.

    Call it once in a process, before it loads a model.

    Args:
        device: The functions to replace.
        kind: Metal and CUDA are `mx.gpu`; `None` is the one that MLX computes on.
    """
    if (kind or mx.default_device()) != mx.Device(mx.cpu):
        info = mx.device_info()
        device.adapt_to(info)
        if "compute_capability_major" in info:
            cuda.install(device)
        return
    remove_damaged_graphs(Path(tempfile.gettempdir()))
    device.blocks_dispatch = True
    device.prepare = _prepare
    device.prepare_training = _prepare_training
    device.choose_threads = choose_threads
    device.lowest_kept = _lowest_kept
    device.turns_per_clear = _TURNS_PER_CLEAR
    device.compiles_from = CPU_COMPILES_FROM
    if _HAS_SLOW_EXPONENTIALS:
        device.exp = exp
        device.log_sum_exp = log_sum_exp
        device.attend, device.attend_from = attend_whole, LEAST_NUMBERS
        device.attend_part, device.attend_quantised = attend_part, attend_quantised


def _lowest_kept(logits: mx.array, top_p: mx.array) -> mx.array:
    """Return the smallest logit [R, 1] of logits [R, V] that top-p [R, 1] keeps."""
    rows = zip(np.asarray(logits), np.asarray(top_p)[:, 0], strict=True)
    return mx.array(np.stack(spread(_threshold, list(rows))))[:, None]


def _threshold(row: tuple[_Numbers, np.float32]) -> np.float32:
    """Return the smallest logit of a row that top-p keeps, without sorting the unlikely ones."""
    logits, top_p = row
    weights = np.exp(logits - logits.max())
    total = weights.sum()
    # All that weigh less than this are together lighter than the share that top-p leaves out.
    least = min((1 - top_p) * total / len(logits), np.float32(1))
    likely = np.sort(logits[~(weights < least)])[::-1]
    weights = np.exp(likely - likely[0])
    before = np.cumsum(weights, dtype=np.float64) - weights
    kept = int(np.count_nonzero(before < top_p * total))
    lowest: np.float32 = likely[max(kept, 1) - 1]
    return lowest


def _prepare_training(network: Network) -> None:
    widen_experts(network)
    prepare_products(network, keeps_type=False, dequantises=False, has_gradients=True)


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
        # A load may wait for the compiler, and no request does.
        kernels()
