"""How this process computes where devices differ: as MLX does, unless a device is prepared for.

`backend.cpu.install` does so for a CPU, and takes over the limits of Metal. CUDA needs nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from backend.config import METAL_PASS_S
from backend.model.checkpoint.upstream import Network


class Prepare(Protocol):
    """Prepares the network of a model that is being loaded."""

    def __call__(self, network: Network, *, keeps_type: bool, dequantises: bool = True) -> None:
        """Replace layers and cast weights, which may still be lazy.

        Args:
            keeps_type: Whether the data type of its weights was chosen, and stays.
            dequantises: Whether quantised weights may be dequantised.
        """


class Threads(Protocol):
    """Chooses the number of threads of matrix products by what steps take."""

    @property
    def wants_change(self) -> bool:
        """Whether to call `change` before the next pass, when nothing is being computed."""

    def change(self) -> None:
        """Use the due number; no product may be running."""

    def observe(self, rows: int, seconds: float) -> None:
        """Learn the time of a step that gave one token to each of some rows."""


def _leave(network: Network, *, keeps_type: bool, dequantises: bool = True) -> None:
    """Leave a network as it is."""


def _leave_untrained(_network: Network) -> None:
    """Leave a network as it is."""


def _leave_experts(_network: Network) -> bool:
    return False


def _log_sum_exp(numbers: mx.array) -> mx.array:
    return mx.logsumexp(numbers, axis=-1, keepdims=True)


def _choose_no_threads(_limit: int | None) -> Threads | None:
    return None


@dataclass(slots=True)
class Device:
    """The functions of a device.

    Attributes:
        prepare: Called once for each network, before its weights are read.
        prepare_training: The same for one to be trained, which needs gradients and keeps
            quantised weights.
        widen_experts: Casts all weights to float32 if experts need it, and tells whether they do;
            part of `prepare`.
        log_sum_exp: Logarithm [..., 1] of the sums of e to the power of numbers [..., N].
        sort: Sorts the rows of numbers [..., N], the smallest first; may compute them at once.
        attend: Attention over keys that are one array, called as MLX's function; from so many
            scores on, see `attend_from`: of fewer, MLX's function is the faster.
        attend_from: In numbers of scores, which are the queries times the positions.
        choose_threads: Begins to choose threads, given the maximum (`None` is one per core);
            `None` if there is no choice.
        blocks_dispatch: Whether dispatching a pass takes as long as computing it.
        pass_limit_s: The longest pass that the system tolerates, in seconds.
        max_arrays: The number of arrays that it can hold at once.
    """

    prepare: Prepare = _leave
    prepare_training: Callable[[Network], None] = _leave_untrained
    widen_experts: Callable[[Network], bool] = _leave_experts
    exp: Callable[[mx.array], mx.array] = mx.exp
    log_sum_exp: Callable[[mx.array], mx.array] = _log_sum_exp
    sort: Callable[[mx.array], mx.array] = mx.sort
    attend: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
    attend_from: float = math.inf
    choose_threads: Callable[[int | None], Threads | None] = _choose_no_threads
    blocks_dispatch: bool = False
    pass_limit_s: float = math.inf
    max_arrays: float = math.inf

    def take_limits(self, info: Mapping[str, Any]) -> None:
        """Take over the limits of a device from MLX's facts of it: Metal alone names any."""
        if "resource_limit" in info:
            self.pass_limit_s = METAL_PASS_S
            self.max_arrays = int(info["resource_limit"])


DEVICE = Device()
"""That of this process."""
