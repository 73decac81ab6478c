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
    """Chooses the number of threads of matrix products by the time of steps."""

    @property
    def wants_change(self) -> bool:
        """Whether to call `change` before the next pass, when nothing is being computed."""

    def change(self) -> None:
        """Use the due number; no product may be running."""

    def observe(self, rows: int, seconds: float) -> None:
        """Learn the time of a step that gave one token to each of some rows."""


def _log_sum_exp(numbers: mx.array) -> mx.array:
    return mx.logsumexp(numbers, axis=-1, keepdims=True)


_MATRIX = 2


def is_for_all_heads(mask: mx.array | str | None) -> bool:
    """Tell whether a mask hides the same positions from all heads."""
    return not isinstance(mask, mx.array) or mask.ndim <= _MATRIX or mask.shape[-3] == 1


AttendPart: TypeAlias = Callable[
    [mx.array, mx.array, mx.array, float, mx.array | None],
    tuple[mx.array, mx.array, mx.array] | None,
]


AttendQuantised: TypeAlias = Callable[
    [mx.array, Sequence[mx.array], Sequence[mx.array], float, mx.array | str | None, int],
    mx.array | None,
]


def _leave_to_mlx(*_given: object, **_named: object) -> None:
    """Do nothing, and compute nothing."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The keys and values that one query of each row sees, in several arrays.

    Attributes:
        sources: Keys and values [places, kv heads, positions, width] each.
        table: [rows, pieces, 3] int32: of each piece of a row, in order, its source, its place in
            it, and the number of its first positions; a row with fewer pieces has empty ones.
        longest: The most positions of a row.
        is_even: Whether all rows have the same number, in order in one source.
    """

    sources: Sequence[Sequence[mx.array]]
    table: mx.array
    longest: int
    is_even: bool


class AttendPieces(Protocol):
    """Computes the attention of one query per row."""

    def __call__(
        self,
        queries: mx.array,
        pieces: Pieces,
        *,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Return the attention [rows, heads, 1, width]; `None` leaves it to others.

        Args:
            queries: [rows, heads, 1, width].
            window: The number of latest positions that are seen; `None` is all.
            sinks: [heads] scores of an empty position.
        """


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
        attend_pieces: `None` if the device has no kernel for it.
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
        rounds_float32_as: The type to whose precision products of float32 are rounded: MLX has the
            matrix units of a GPU take them as TF32, which is as precise as float16.
    """

    prepare: Prepare = _leave_to_mlx
    prepare_training: Callable[[Network], None] = _leave_to_mlx
    exp: Callable[[mx.array], mx.array] = mx.exp
    log_sum_exp: Callable[[mx.array], mx.array] = _log_sum_exp
    lowest_kept: Callable[[mx.array, mx.array], mx.array] | None = None
    attend: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
    attend_from: float = math.inf
    attend_part: AttendPart = _leave_to_mlx
    attend_pieces: AttendPieces | None = None
    attend_quantised: AttendQuantised = _leave_to_mlx
    choose_threads: Callable[[int | None], Threads | None] = _leave_to_mlx
    turns_per_clear: int = 256
    blocks_dispatch: bool = False
    compiles_from: int = 0
    pass_limit_s: float = math.inf
    max_arrays: float = math.inf
    rounds_float32_as: mx.Dtype = mx.float32

    def adapt_to(self, info: Mapping[str, Any]) -> None:
        """Adapt to a GPU by MLX's facts of it: Metal names limits, and CUDA its capability."""
        self.rounds_float32_as = mx.float16
        if "resource_limit" in info:
            self.pass_limit_s = METAL_PASS_S
            self.max_arrays = int(info["resource_limit"])

    def precision(self, dtype: mx.Dtype) -> mx.Dtype:
        """Return the type that is as precise as products of arrays of a type are."""
        return self.rounds_float32_as if dtype == mx.float32 else dtype


DEVICE = Device()
"""That of this process."""
