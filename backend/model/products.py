"""Matrix products on a Linux CPU with OpenBLAS, which computes float32 many times faster than MLX.

MLX 0.32 passes only products of float32 to a BLAS. It computes those of 16-bit and of quantised
weights itself, on one thread; the latter take 8 (bfloat16) or 35 times (float16) as long with
16-bit scales as with scales of float32.
"""

import logging

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from backend.config import FLOAT32_MEMORY_SHARE, FLOAT32_MIN_BYTES
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import cast, memory_bytes
from common.openblas import has_openblas

_GB = 1e9
_HALVES = (mx.bfloat16, mx.float16)
# Fewer tokens are multiplied with quantised weights in less time than it takes to dequantise those.
_LEAST_TOKENS = 5
# Dequantised at once, as they are needed: 4 MiB.
_PIECE_WEIGHTS = 2**20

log = logging.getLogger(__name__)


def prepare_products(network: Network, *, keeps_type: bool) -> None:
    """Have a network computed by OpenBLAS as far as possible, if this process has it.

    Args:
        network: A network whose weights may still be lazy.
        keeps_type: Whether 16-bit weights keep their type. Otherwise they are cast to float32
            if there are enough of them to notice, and few enough for the memory.
    """
    if mx.default_device() != mx.Device(mx.cpu) or not has_openblas():
        return
    if not keeps_type:
        _widen(network)
    for module in network.modules():
        # Not those of subclasses, which compute something else.
        if replacement := _REPLACEMENTS.get(type(module)):
            module.__class__ = replacement


def _widen(network: Network) -> None:
    weights = [weight for _, weight in tree_flatten(network.parameters())]
    halves = {weight.dtype for weight in weights if weight.dtype in _HALVES}
    before = sum(weight.nbytes for weight in weights)
    if not halves or before < FLOAT32_MIN_BYTES:
        return
    after = before + sum(weight.nbytes for weight in weights if weight.dtype in _HALVES)
    name = str(halves.pop()).removeprefix("mlx.core.")
    if after > FLOAT32_MEMORY_SHARE * memory_bytes():
        log.warning(
            "the weights stay %s, which a CPU computes many times slower than float32: those would "
            "take %.1f GB of memory (DType float32 takes them all the same)",
            *(name, after / _GB),
        )
        return
    cast(network, "float32")
    log.info(
        "%s is cast to float32, which this CPU computes many times faster: %.2f GB of weights "
        "instead of %.2f (DType %s keeps it)",
        *(name, after / _GB, before / _GB, name),
    )


class _QuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """Multiplies several tokens with dequantised weights."""

    def __call__(self, inputs: mx.array) -> mx.array:
        if not _is_wide(inputs):
            return super().__call__(inputs)
        outputs = _dequantised_product(self, inputs)
        return outputs + self["bias"] if "bias" in self else outputs


class _QuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """Multiplies several tokens with dequantised weights, as the last layer."""

    def as_linear(self, inputs: mx.array) -> mx.array:
        return _dequantised_product(self, inputs) if _is_wide(inputs) else super().as_linear(inputs)


_REPLACEMENTS = {
    nn.QuantizedLinear: _QuantizedLinear,
    nn.QuantizedEmbedding: _QuantizedEmbedding,
}


def _is_wide(inputs: mx.array) -> bool:
    tokens = inputs.size // inputs.shape[-1]
    return tokens >= _LEAST_TOKENS and bool(inputs.dtype == mx.float32)


def _dequantised_product(module: Network, inputs: mx.array) -> mx.array:
    """Multiply inputs [..., width] with a module's weights [outputs, width]."""
    weights, scales, biases = module["weight"], module["scales"], module.get("biases")
    rows = max(1, _PIECE_WEIGHTS // inputs.shape[-1])
    pieces = []
    for first in range(0, weights.shape[0], rows):
        piece = slice(first, first + rows)
        matrix = mx.dequantize(
            weights[piece],
            scales[piece],
            None if biases is None else biases[piece],
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
            dtype=inputs.dtype,
        )
        pieces.append(inputs @ matrix.T)
    return mx.concatenate(pieces, axis=-1)
