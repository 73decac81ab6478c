"""Casts, measures and reads a network's weights."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from backend.errors import LoadError, OutOfMemoryError
from backend.model.checkpoint.config_file import WEIGHTS_PATTERN
from backend.model.checkpoint.upstream import Network
from common.machine_memory import machine_bytes, trim

MakeRoom: TypeAlias = Callable[[int], None]
"""Called with the size of weights before they are read."""

PIECE_BYTES = 256 * 2**20

# A layer of float32 has its weights as the checkpoint stores them here, if a few tokens meet those.
STORED = "_stored"

_GIB = 2**30


def rules_out_float32(dtype: str | None) -> bool:
    """Tell whether weights of a chosen type, or of none, may not become float32 on a CPU."""
    return dtype not in (None, "float32")


def require_fractions(network: Network, directory: Path) -> None:
    """Refuse weights of whole numbers, unless their module has scales that make fractions of them.

    Most computations would take them, and give nonsense.
    """
    types = {
        tuple(name.rpartition(".")[::2]): each.dtype
        for name, each in tree_flatten(network.parameters())
    }
    scaled = {module for module, name in types if "scale" in name}
    for (module, name), kind in types.items():
        is_plain = name in ("weight", "bias") and module not in scaled
        if is_plain and not mx.issubdtype(kind, mx.floating):
            told = str(kind).rpartition(".")[2]
            problem = f"{module}.{name} has values of type {told}, no fractions, and no scales"
            raise LoadError(f"{directory}: {problem}")


def cast_weights(network: Network, dtype: str) -> None:
    """Cast floating-point weights lazily, except those that the model keeps exact.

    Args:
        network: A network, whose weights may still be lazy.
    """
    target = getattr(mx, dtype)
    is_cast: Callable[[str], bool] = getattr(network, "cast_predicate", lambda _: True)

    def cast_one(path: str, weight: mx.array) -> mx.array:
        floating = mx.issubdtype(weight.dtype, mx.floating)
        return weight.astype(target) if floating and is_cast(path) else weight

    network.update(tree_map_with_path(cast_one, network.parameters()))


def weights_bytes(network: Network) -> int:
    """Return the size of all weights without reading them, with those beside others."""
    beside = [array for name, array in tree_flatten(network.state) if STORED in name.split(".")]
    weights = [weight for _, weight in tree_flatten(network.parameters())]
    return sum(array.nbytes for array in (*weights, *beside))


def files_bytes(directory: Path) -> int:
    """Return the size of a checkpoint's files of weights."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def weight_types(network: Network) -> list[str]:
    """Return the names of the data types of all weights, in order."""
    return sorted({str(weight.dtype) for _, weight in tree_flatten(network.parameters())})


def memory_bytes() -> int:
    """Return the memory that weights may take, in bytes: the device's, or else the machine's."""
    device = mx.device_info()
    total = device.get("memory_size") or device.get("total_memory")
    return int(total or machine_bytes())


def need_no_room(_needed: int) -> None:
    """Make no room: no other weights are in memory."""


def require_memory(needed: int, available: int) -> None:
    """Refuse weights larger than the memory: on a CPU, MLX would crash the process.

    Raises:
        OutOfMemoryError: The message gives both numbers.
    """
    if needed > available:
        raise OutOfMemoryError(
            f"the weights need {needed / _GIB:.1f} GiB of memory and there are "
            f"{available / _GIB:.1f} GiB"
        )


def evaluate(network: Network) -> None:
    """Read the weights into memory piece by piece."""
    for piece in _pieces(network, PIECE_BYTES):
        mx.eval(piece)
    # Private arrays too: another thread cannot evaluate lazy ones.
    mx.eval(network.state)
    # Of weights that were cast.
    mx.clear_cache()
    trim()


def _pieces(network: Network, piece_bytes: int) -> Iterator[list[mx.array]]:
    piece: list[mx.array] = []
    size = 0
    for _, weight in tree_flatten(network.parameters()):
        piece.append(weight)
        size += weight.nbytes
        if size >= piece_bytes:
            yield piece
            piece, size = [], 0
    yield piece


Weights: TypeAlias = dict[str, mx.array]

# Without a head, a network computes its logits with the token embeddings.
HEADLESS_CONFIG: Mapping[str, Any] = {"tie_word_embeddings": True}


def is_bare_decoder(directory: Path) -> bool:
    """Tell by the names of the weights, without reading the weights."""
    names = {name for path in directory.glob(WEIGHTS_PATTERN) for name in mx.load(str(path))}
    roots = {name.partition(".")[0] for name in names}
    return "layers" in roots and "model" not in roots


def decoder_classes(config: Mapping[str, Any]) -> tuple[type, type]:
    """Return the classes of a network and of its arguments, for mlx-lm's `load_model`.

    The network takes all given weights as its decoder's.
    """
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    sanitize = getattr(module.Model, "sanitize", lambda _network, weights: weights)

    def sanitize_decoder(network: object, weights: Weights) -> Weights:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return cast("Weights", sanitize(network, named))

    members = {"sanitize": sanitize_decoder, "__module__": module.__name__}
    return type("Model", (module.Model,), members), module.ModelArgs
