"""How this process computes where devices differ: as MLX does, unless a device is prepared for.

`backend.cpu.install` does so for a CPU, and has other devices learn from MLX's facts of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from backend.config import METAL_PASS_S
from backend.model.checkpoint.upstream import Network


class Prepare(Protocol):
    """Prepares the network of a model that is being loaded."""

    def __call__(
        self,
        network: Network,
        *,
        keeps_type: bool,
        dequantises: bool = True,
        least_bytes: int | None = None,
    ) -> None:
        """Replace layers and cast weights, which may still be lazy.

        Args:
            keeps_type: Whether the data type of its weights was chosen, and stays.
            dequantises: Whether quantised weights may be dequantised.
            least_bytes: Fewer bytes of weights keep their type; `None` suits single tokens.
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


def _leave(
    network: Network, *, keeps_type: bool, dequantises: bool = True, least_bytes: int | None = None
) -> None:
    """Leave a network as it is."""


def _leave_untrained(_network: Network) -> None:
    """Leave a network as it is."""


def _log_sum_exp(numbers: mx.array) -> mx.array:
    return mx.logsumexp(numbers, axis=-1, keepdims=True)


AttendPart: TypeAlias = Callable[
    [mx.array, mx.array, mx.array, float, mx.array | None],
    tuple[mx.array, mx.array, mx.array] | None,
]


AttendQuantised: TypeAlias = Callable[
    [mx.array, Sequence[mx.array], Sequence[mx.array], float, mx.array | str | None, int],
    mx.array | None,
]


def _leave_to_mlx(*_given: object) -> None:
    """Compute nothing."""


def _choose_no_threads(_limit: int | None) -> Threads | None:
    return None


# MLX has a kernel of its own for so few queries without a mask.
_VECTOR_QUERIES = 3
# 128 MiB of scores in float32.
_MOST_SCORES = 2**25
_MATRIX = 2


def attend_unplanned(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return what `mx.fast.scaled_dot_product_attention` does, without a plan of cuDNN.

    On CUDA MLX's function makes a plan for every new pair of lengths: 40 to 60 ms on an H100, and
    630 to 740 ms with a mask that is an array. That is more than the pass of a short prompt, and
    hardly two prompts have the same length. Large passes are left to it.

    Args:
        queries: [rows, heads, width, head width].
        keys: [rows, kv heads, positions, head width].
        values: [rows, kv heads, positions, value width].
        mask: As MLX's function takes it.
        sinks: [heads] scores of an empty position.
    """
    rows, heads, width, head_width = queries.shape
    kv_heads, positions = keys.shape[1:3]
    is_large = rows * heads * width * positions > _MOST_SCORES
    has_kernel = width == 1 or (width <= _VECTOR_QUERIES and not isinstance(mask, mx.array))
    if is_large or has_kernel or sinks is not None or not is_for_all_heads(mask):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    flat = (queries.astype(mx.float32) * scale).reshape(rows, kv_heads, -1, head_width)
    scores = flat @ keys.astype(mx.float32).swapaxes(-1, -2)
    by_head = scores.reshape(rows, kv_heads, heads // kv_heads, width, positions)
    if mask is not None:
        by_head = _masked(by_head, mask)
    weights = mx.softmax(by_head, axis=-1).astype(values.dtype).reshape(scores.shape)
    return (weights @ values).reshape(rows, heads, width, -1)


def is_for_all_heads(mask: mx.array | str | None) -> bool:
    """Tell whether a mask hides the same positions from all heads."""
    return not isinstance(mask, mx.array) or mask.ndim <= _MATRIX or mask.shape[-3] == 1


def _masked(scores: mx.array, mask: mx.array | str) -> mx.array:
    """Apply a mask to scores [rows, kv heads, repeats, width, positions]."""
    width, positions = scores.shape[-2:]
    if isinstance(mask, str):
        mask = mx.arange(positions) <= mx.arange(positions - width, positions)[:, None]
    elif mask.ndim > _MATRIX:
        # Of rows, and of one head.
        mask = mask.reshape(-1, 1, 1, *mask.shape[-2:])
    if mask.dtype != mx.bool_:
        return scores + mask
    return mx.where(mask, scores, mx.finfo(mx.float32).min)


@dataclass(slots=True)
class Device:
    """The functions of a device.

    Attributes:
        prepare: Called once for each network, before its weights are read.
        prepare_training: The same for one to be trained, which needs gradients and keeps
            quantised weights.
        log_sum_exp: Logarithm [..., 1] of the sums of e to the power of numbers [..., N].
        lowest_kept: The smallest logit [R, 1] of logits [R, V] that top-p [R, 1] keeps, computed at
            once; `None` if sorting them is fast.
        attend: Attention over keys that are one array, called as MLX's function; from so many
            scores on, see `attend_from`: of fewer, MLX's function is the faster.
        attend_from: In numbers of scores, which are the queries times the positions.
        attend_part: Attention of queries [rows, heads, width, head width] to some keys [rows or 1,
            kv heads, positions, head width] and values, given the scale and a mask [rows, 1, width
            or 1, positions]: the sums of values weighted by `exp(score - top)`, the largest scores
            `top`, and the sums of the weights. `None` leaves it to MLX.
        attend_quantised: Attention of queries to words, scales and biases of keys and of values,
            given the scale, mask and bits. `None` leaves it to MLX.
        choose_threads: Begins to choose threads, given the maximum (`None` is one per core);
            `None` if there is no choice.
        turns_per_clear: After so many turns MLX's free buffers are given back. A GPU allocates anew
            slowly; mlx-lm waits as long.
        blocks_dispatch: Whether dispatching a pass takes as long as computing it.
        compiles_from: In passes: a shorter training takes less time without compiled kernels.
        pass_limit_s: The longest pass that the system tolerates, in seconds.
        max_arrays: The number of arrays that it can hold at once.
    """

    prepare: Prepare = _leave
    prepare_training: Callable[[Network], None] = _leave_untrained
    exp: Callable[[mx.array], mx.array] = mx.exp
    log_sum_exp: Callable[[mx.array], mx.array] = _log_sum_exp
    lowest_kept: Callable[[mx.array, mx.array], mx.array] | None = None
    attend: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
    attend_from: float = math.inf
    attend_part: AttendPart = _leave_to_mlx
    attend_quantised: AttendQuantised = _leave_to_mlx
    choose_threads: Callable[[int | None], Threads | None] = _choose_no_threads
    turns_per_clear: int = 256
    blocks_dispatch: bool = False
    compiles_from: int = 0
    pass_limit_s: float = math.inf
    max_arrays: float = math.inf

    def adapt_to(self, info: Mapping[str, Any]) -> None:
        """Adapt to a GPU by MLX's facts of it: Metal names limits, and CUDA its capability."""
        if "resource_limit" in info:
            self.pass_limit_s = METAL_PASS_S
            self.max_arrays = int(info["resource_limit"])
        if "compute_capability_major" in info:
            self.attend, self.attend_from = attend_unplanned, 0


DEVICE = Device()
"""That of this process."""
