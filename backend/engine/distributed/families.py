"""Which models can be divided, and into how many parts: checked before any process starts."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from backend.engine.distributed.messages import Form
from backend.engine.distributed.topology import Parallelism, Topology
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import Network

# Machines that differ by less are treated alike.
_TOLERANCE = 0.1


def pipeline_split(form: Form, memory_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of every rank; none if an even split is as good.

    Args:
        form: The group and its model.
        memory_bytes: The memory of each rank.
    """
    if form.topology.parallelism is not Parallelism.PIPELINE:
        return ()
    if min(memory_bytes) >= (1.0 - _TOLERANCE) * max(memory_bytes):
        return ()
    config = json.loads((form.directory / "config.json").read_text(encoding="utf-8"))
    layers = config.get("text_config", config)["num_hidden_layers"]
    return shares(layers, memory_bytes)


def shares(layers: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers for each weight, in proportion and at least one.

    The layers left by rounding go to the largest remainders.
    """
    spare = layers - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    counts = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: layers - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


_MARKS = {Parallelism.TENSOR: "def shard(", Parallelism.PIPELINE: "PipelineMixin"}


@dataclass(frozen=True, slots=True)
class Seat:
    """A fictional place in a group, enough to divide a network on trial."""

    place: int
    count: int

    def rank(self) -> int:
        """Return the place."""
        return self.place

    def size(self) -> int:
        """Return the number of places."""
        return self.count


def require_divisible(network: Network, config: Mapping[str, Any], topology: Topology) -> None:
    """Refuse a network that cannot be divided; it is unusable afterwards.

    Args:
        network: Not loaded into memory yet.
        config: Its config.json.
        topology: The group that will share it.

    Raises:
        UnsupportedModelError: Names the families, or the sizes, that work.
    """
    kind = config["model_type"]
    match topology.parallelism:
        case Parallelism.TENSOR:
            _require_shards(network, kind, _text_config(config), topology.size)
        case Parallelism.PIPELINE:
            _require_stages(network, kind, topology.size)


@cache
def divisible_families(parallelism: Parallelism) -> tuple[str, ...]:
    """Return the families that the installed mlx-lm can divide, found in its source."""
    spec = importlib.util.find_spec("mlx_lm.models")
    places = spec.submodule_search_locations if spec else None
    sources = [path for place in places or () for path in Path(place).glob("*.py")]
    mark = _MARKS[parallelism]
    return tuple(
        sorted(
            path.stem
            for path in sources
            if path.stem != "pipeline" and mark in path.read_text(encoding="utf-8")
        )
    )


def _require_shards(network: Network, kind: str, config: Mapping[str, Any], size: int) -> None:
    if not hasattr(network, "shard"):
        raise _unsupported(kind, Parallelism.TENSOR)
    heads = _divided_heads(config)
    sizes = [n for n in range(2, min(heads) + 1) if all(count % n == 0 for count in heads)]
    told = f"{kind} has {' and '.join(map(str, heads))} heads; sizes that work: {_listed(sizes)}"
    if size not in sizes:
        raise UnsupportedModelError(f"tensor parallel over {size} processes: {told}")
    try:
        network.shard(Seat(0, size))
    except (AssertionError, ValueError) as error:
        raise UnsupportedModelError(
            f"tensor parallel over {size} processes: {kind} cannot be divided so: {error}; {told}"
        ) from error


def _require_stages(network: Network, kind: str, size: int) -> None:
    if not hasattr(getattr(network, "model", None), "pipeline"):
        raise _unsupported(kind, Parallelism.PIPELINE)
    layers = len(network.model.layers)
    if size > layers:
        raise UnsupportedModelError(
            f"a pipeline of {size} processes: {kind} has {layers} layers; sizes that work: "
            f"2 to {layers}"
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner: Mapping[str, Any] = config.get("text_config", config)
    return inner


def _divided_heads(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of heads that the size of the group must divide."""
    heads = int(config.get("num_attention_heads") or 1)
    # Latent attention shares its compressed keys among all heads.
    kv_heads = None if config.get("kv_lora_rank") else config.get("num_key_value_heads")
    return (heads, int(kv_heads)) if kv_heads else (heads,)


def _unsupported(kind: str, parallelism: Parallelism) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{kind} has no {parallelism.value} parallelism in mlx-lm; families that have it: "
        f"{', '.join(divisible_families(parallelism))}"
    )


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"
