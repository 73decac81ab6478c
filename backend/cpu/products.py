"""Matrix products on a Linux CPU with OpenBLAS, which computes float32 many times faster than MLX.

MLX 0.32 passes only products of float32 to a BLAS. It computes those of 16-bit and of quantised
weights itself, on one thread; the latter take 8 (bfloat16) or 35 times (float16) as long with
16-bit scales as with scales of float32.
"""

import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from backend.config import DEQUANTISED_MEMORY_SHARE, FLOAT32_MEMORY_SHARE, FLOAT32_MIN_BYTES
from backend.cpu.kernels import kernels
from backend.cpu.stored_products import WIDENED, knows, multiply, stored_form
from backend.cpu.tokenwise import prepare_tokenwise
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import STORED, cast_weights, memory_bytes
from common import openblas
from common.openblas import has_openblas
from common.process import usable_cores

# To start with, if there are so many cores: few products gain from more.
FIRST_THREADS = 4
# Twice as many threads are taken if steps are faster by the first factor, and given up below the
# second: other work wants the cores as well.
LEAST_GAIN, LEAST_KEPT_GAIN = 1.15, 1.05
# Steps with another number, and with the present one, whose medians are compared.
TRIED_STEPS = 8
# A slower number is tried until it has lost this share of a usual step.
_MOST_LOST = 0.5
# Steps between trials; twice as many after each that changes nothing.
FIRST_REST, LONGEST_REST = 16, 2048

Stored: TypeAlias = Mapping[str, mx.array]

log = logging.getLogger(__name__)


class ThreadChoice:
    """The number of threads, as a policy: told the time of steps, it chooses the next number.

    Attributes:
        count: For the next step.
    """

    def __init__(self, most: int) -> None:
        """Start with a usual number.

        Args:
            most: The largest number.
        """
        self._most = most
        self._base = self.count = min(most, FIRST_THREADS)
        self._rows = 0
        self._latest: deque[float] = deque(maxlen=TRIED_STEPS)
        self._tried: list[float] = []
        self._rest = self._left = FIRST_REST
        self._goes_up = False

    def observe(self, rows: int, seconds: float) -> None:
        """Learn the time of a step that gave one token to each of some rows."""
        if rows != self._rows:
            self._begin_with(rows)
        if self.count == self._base:
            self._latest.append(seconds)
            self._left -= 1
            if self._left <= 0 and len(self._latest) == TRIED_STEPS:
                self._try_another()
        else:
            self._tried.append(seconds)
            self._judge()

    def _begin_with(self, rows: int) -> None:
        """Forget times of steps with other numbers of rows, which cannot be compared."""
        self._rows, self.count = rows, self._base
        self._latest.clear()
        self._tried.clear()

    def _try_another(self) -> None:
        """Use another number for some steps: more and fewer in turn."""
        self._goes_up = not self._goes_up
        others = [n for n in self._neighbours() if n != self._base]
        if others:
            self.count = others[0]
        self._left = self._rest

    def _neighbours(self) -> Iterator[int]:
        more, fewer = min(2 * self._base, self._most), max(self._base // 2, 1)
        yield from (more, fewer) if self._goes_up else (fewer, more)

    def _judge(self) -> None:
        """Compare, once that can be told."""
        usual, tried = median(self._latest), median(self._tried)
        lost_s = sum(self._tried) - usual * len(self._tried)
        if len(self._tried) < TRIED_STEPS and lost_s < _MOST_LOST * usual:
            return
        if self._is_better(usual, tried):
            self._base, self._rest = self.count, FIRST_REST
            log.info("threads for each matrix product: %d of at most %d", self._base, self._most)
        else:
            self._rest = min(2 * self._rest, LONGEST_REST)
        self._left = self._rest
        self._begin_with(self._rows)

    def _is_better(self, usual: float, tried: float) -> bool:
        """Tell whether the tried number is to be kept, by the seconds of steps."""
        is_more = self.count > self._base
        return usual >= LEAST_GAIN * tried if is_more else tried < LEAST_KEPT_GAIN * usual


class ProductThreads:
    """Sets the number of threads of this process; requires OpenBLAS."""

    def __init__(self, most: int) -> None:
        """Set the first number.

        Args:
            most: The maximum.
        """
        self._choice = ThreadChoice(most)
        self._count = 0
        self.change()
        log.info("threads for each matrix product: %d of at most %d", self._count, most)

    @property
    def wants_change(self) -> bool:
        """Whether to call `change` before the next pass, when nothing is being computed."""
        return self._choice.count != self._count

    def change(self) -> None:
        """Use the due number; no product may be running."""
        self._count = self._choice.count
        openblas.set_threads(self._count)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn the time of a step; one before a due change was not with the due number."""
        if self._choice.count == self._count:
            self._choice.observe(rows, seconds)


def choose_threads(limit: int | None) -> ProductThreads | None:
    """Begin to choose the threads of this process.

    Args:
        limit: The maximum; `None` is as many as there are cores.

    Returns:
        `None` without OpenBLAS, and if the environment sets more than one thread.
    """
    if not openblas.has_openblas() or openblas.threads() > 1:
        return None
    log.info("OpenBLAS multiplies with its kernels for %s", openblas.kernel_name())
    cores = usable_cores()
    return ProductThreads(min(cores, limit) if limit else cores)


_GB = 1e9
_HALVES = (mx.bfloat16, mx.float16)
_QUANTISED = ("weight", "scales", "biases")
# Fewer tokens are multiplied with quantised weights in less time than it takes to dequantise those.
_LEAST_TOKENS = 5
# Dequantised at once, as they are needed: 4 MiB.
PIECE_WEIGHTS = 2**20


def widen_experts(network: Network) -> bool:
    """Cast all weights to float32 if there are experts of another type.

    On a CPU, MLX 0.32 only multiplies gathered 32-bit matrices; otherwise the first token would
    fail. Quantised experts are unaffected.

    Returns:
        Whether the weights were cast.
    """
    types = {dtype for module in network.modules() for dtype in _expert_types(module)}
    if types <= {mx.float32}:
        return False
    cast_weights(network, "float32")
    return True


def _expert_types(module: Network) -> set[mx.Dtype]:
    """Return the data types of the matrices of a layer of unquantised experts; none of others."""
    match type(module).__name__:
        case "SwitchLinear":
            return {module.weight.dtype}
        case "ExpertLinear" if not module.is_quantised:
            return set(module.types)
    return set()


def prepare_products(
    network: Network,
    *,
    keeps_type: bool,
    dequantises: bool = True,
    has_gradients: bool = False,
    least_bytes: int | None = None,
) -> None:
    """Have a network computed by OpenBLAS as far as possible, if this process has it.

    Args:
        network: A network whose weights may still be lazy.
        keeps_type: Whether weights keep their type. Otherwise they become float32 if there are
            enough of them to notice, and few enough for the memory.
        least_bytes: The size that is enough to notice; `None` is that in steps of single tokens.
        dequantises: Whether that goes for quantised weights too, and not only for their scales.
        has_gradients: Whether the network is to be trained.
    """
    if not has_openblas():
        return
    enough = FLOAT32_MIN_BYTES if least_bytes is None else least_bytes
    is_large = _size(network) >= enough
    computes = is_large and not has_gradients and kernels() is not None
    if not keeps_type and is_large:
        # Where `least_bytes` is given, passes of single tokens are rare.
        stored = _stored(network) if computes and least_bytes is None else []
        # One line says how the weights are kept: of quantised ones, the first.
        if dequantises and _quantised_layers(network):
            _dequantise(network)
            _keep_beside(network, stored, DEQUANTISED_MEMORY_SHARE)
        else:
            _widen(network)
            _keep_beside(network, stored, FLOAT32_MEMORY_SHARE)
    has_kernel = computes and _has_work_for_kernel(network)
    if has_kernel or any(STORED in module for module in network.modules()):
        prepare_tokenwise()
    for module in network.modules():
        # Not those of subclasses, which compute something else.
        if replacement := _REPLACEMENTS[has_kernel].get(type(module)):
            module.__class__ = replacement


def _stored(network: Network) -> list[tuple[Network, Stored]]:
    """Return the layers that decode tokens, with the weights that the kernel can read."""
    decoder: Any = getattr(network, "language_model", network)
    matrices = [module for module in decoder.modules() if type(module) in {*_PLAIN, *_BESIDE}]
    outputs = {module.weight.shape[0] for module in matrices if not _is_embedding(module)}
    return [
        (module, form)
        for module in matrices
        # Some other layer is the last one, and an embedding that it is not multiplies nothing.
        if not (_is_embedding(module) and module.weight.shape[0] in outputs)
        and (form := stored_form(module))
    ]


def _is_embedding(module: Network) -> bool:
    return isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))


def _keep_beside(network: Network, stored: Sequence[tuple[Network, Stored]], share: float) -> None:
    """Keep the weights of layers that became float32 also as they were stored, if all fit.

    Args:
        share: Of the memory, for all weights.
    """
    became = [
        (module, form)
        for module, form in stored
        if type(module) in _BESIDE and module["weight"].dtype == mx.float32
    ]
    size = sum(array.nbytes for _, form in became for array in form.values())
    if not became or _size(network) + size > share * memory_bytes():
        return
    for module, form in became:
        setattr(module, STORED, form)
        # Not as an array of the module, which has it already.
        module.__dict__[WIDENED] = module["weight"]
        module.__class__ = _BESIDE[type(module)]
    log.info("beside float32 they are kept as stored, %.2f GB, for a few tokens", size / _GB)


def _has_work_for_kernel(network: Network) -> bool:
    """Tell whether our kernel knows some layers that stayed quantised."""
    return any(type(module) in _PLAIN and knows(module) for module in network.modules())


def _quantised_layers(network: Network) -> list[tuple[Network, type[nn.Module]]]:
    """Return the layers that can be dequantised, with the class that they would get."""
    return [
        (module, plain)
        for module in network.modules()
        if (plain := _plain_class(module)) and module.get("global_scale") is None
    ]


def _dequantise(network: Network) -> None:
    """Replace quantised layers by such of float32, if those of all fit into a part of memory.

    All other numbers of 16 bits become float32 as well, if they may.
    """
    layers = _quantised_layers(network)
    weights = [_dequantised(module) for module, _ in layers]
    quantised = [
        module[name] for module, _ in layers for name in _QUANTISED if module.get(name) is not None
    ]
    others = _widened_size(network) - sum(map(_widened, quantised))
    before, after = _size(network), others + sum(weight.nbytes for weight in weights)
    if after > DEQUANTISED_MEMORY_SHARE * memory_bytes():
        log.info(
            "the weights stay quantised: as float32 they would take %.2f GB instead of %.2f, more "
            "than a quarter of the memory",
            *(after / _GB, before / _GB),
        )
        if _widened_size(network) <= FLOAT32_MEMORY_SHARE * memory_bytes():
            cast_weights(network, "float32")
        return
    for (module, plain), weight in zip(layers, weights, strict=True):
        for name in _QUANTISED:
            module.pop(name, None)
        module.weight = weight
        module.__class__ = plain
    cast_weights(network, "float32")
    log.info(
        "quantised weights are dequantised to float32, which this CPU computes several times "
        "faster: %.2f GB of weights instead of %.2f (option dequantize:false keeps them)",
        *(after / _GB, before / _GB),
    )


def _plain_class(module: Network) -> type[nn.Module] | None:
    """Return the class of a quantised layer's unquantised counterpart.

    Not that of a subclass, which computes something else.
    """
    kind = type(module)
    if kind.__name__ == "QuantizedSwitchLinear":
        experts: type[nn.Module] | None = getattr(
            sys.modules[kind.__module__], "SwitchLinear", None
        )
        return experts
    return _PLAIN.get(kind)


def _widen(network: Network) -> None:
    """Cast weights of 16 bits to float32, if those fit into a part of memory."""
    halves = {array.dtype for array in _arrays(network) if array.dtype in _HALVES}
    if not halves:
        return
    before, after = _size(network), _widened_size(network)
    name = str(halves.pop()).removeprefix("mlx.core.")
    if after > FLOAT32_MEMORY_SHARE * memory_bytes():
        log.warning(
            "the weights stay %s, which a CPU computes many times slower than float32: those would "
            "take %.1f GB of memory (DType float32 takes them all the same)",
            *(name, after / _GB),
        )
        return
    cast_weights(network, "float32")
    log.info(
        "%s is cast to float32, which this CPU computes many times faster: %.2f GB of weights "
        "instead of %.2f (DType %s keeps it)",
        *(name, after / _GB, before / _GB, name),
    )


def _arrays(network: Network) -> list[mx.array]:
    return [array for _, array in tree_flatten(network.parameters())]


def _size(network: Network) -> int:
    return sum(array.nbytes for array in _arrays(network))


def _widened_size(network: Network) -> int:
    return sum(map(_widened, _arrays(network)))


def _widened(array: mx.array) -> int:
    """Return the size of an array in bytes once it has no numbers of 16 bits."""
    size: int = array.nbytes
    return 2 * size if array.dtype in _HALVES else size


class _QuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """Multiplies several tokens with dequantised weights."""

    def __call__(self, inputs: mx.array) -> mx.array:
        if not _is_wide(inputs):
            return super().__call__(inputs)
        outputs = dequantised_product(self, inputs)
        return outputs + self["bias"] if "bias" in self else outputs


class _QuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """Multiplies several tokens with dequantised weights, as the last layer."""

    def as_linear(self, inputs: mx.array) -> mx.array:
        if not _is_wide(inputs):
            return super().as_linear(inputs)
        return dequantised_product(self, inputs)


class _ByKernel(nn.Module):  # type: ignore[misc]
    """A layer that multiplies by our kernel if that knows how; it has no gradient."""

    def __call__(self, inputs: mx.array) -> mx.array:
        if (outputs := multiply(self, inputs)) is None:
            return super().__call__(inputs)
        return outputs + self["bias"] if "bias" in self else outputs


class _HeadByKernel(nn.Module):  # type: ignore[misc]
    """An embedding that multiplies by our kernel as the last layer, if that knows how."""

    def as_linear(self, inputs: mx.array) -> mx.array:
        outputs = multiply(self, inputs)
        return super().as_linear(inputs) if outputs is None else outputs


class _KernelLinear(_ByKernel, _QuantizedLinear):
    """Its weights stayed quantised."""


class _KernelEmbedding(_HeadByKernel, _QuantizedEmbedding):
    """Its weights stayed quantised."""


class _LinearBeside(_ByKernel, nn.Linear):  # type: ignore[misc]
    """Its weights are float32, with stored ones beside."""


class _EmbeddingBeside(_HeadByKernel, nn.Embedding):  # type: ignore[misc]
    """Its weights are float32, with stored ones beside."""


_BESIDE = {nn.Linear: _LinearBeside, nn.Embedding: _EmbeddingBeside}
_PLAIN = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding}
# By whether our kernel computes them.
_REPLACEMENTS = {
    False: {nn.QuantizedLinear: _QuantizedLinear, nn.QuantizedEmbedding: _QuantizedEmbedding},
    True: {nn.QuantizedLinear: _KernelLinear, nn.QuantizedEmbedding: _KernelEmbedding},
}


def _is_wide(inputs: mx.array) -> bool:
    tokens = inputs.size // inputs.shape[-1]
    return tokens >= _LEAST_TOKENS and bool(inputs.dtype == mx.float32)


def dequantised_product(module: Network, inputs: mx.array) -> mx.array:
    """Multiply inputs [..., width] with a module's weights [outputs, width]."""
    outputs = module["weight"].shape[0]
    rows = max(1, PIECE_WEIGHTS // inputs.shape[-1])
    pieces = [
        inputs @ _dequantised(module, slice(first, first + rows)).T
        for first in range(0, outputs, rows)
    ]
    return mx.concatenate(pieces, axis=-1)


def _dequantised(module: Network, rows: slice = slice(None)) -> mx.array:
    """Return some rows of the weights of a quantised layer, as float32."""
    weights, scales, *biases = (
        module[name][rows] for name in _QUANTISED if module.get(name) is not None
    )
    if scales.dtype in _HALVES:
        scales, *biases = (array.astype(mx.float32) for array in (scales, *biases))
    form = {name: getattr(module, name) for name in ("group_size", "bits", "mode")}
    matrix: mx.array = mx.dequantize(weights, scales, *biases, **form, dtype=mx.float32)
    return matrix
