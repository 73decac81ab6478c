"""The network of a head: the parts common to all kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from backend.errors import UnsupportedModelError
from backend.model.checkpoint.config_file import (
    CONFIG_NAME,
    WEIGHTS_PATTERN,
    read_json,
    require_sensible,
)
from backend.model.checkpoint.upstream import Network

# Arrays in nested dicts and lists, as MLX keeps them.
Arrays: TypeAlias = Any


class Target:
    """The parts of a model that a head uses.

    Attributes:
        embed: Maps ids [B, T] to embeddings [B, T, D].
        layers: In order.
        norm: The last norm.
        project: Maps normed states to logits.
        width: The width of its hidden states.
        vocab_size: The number of ids that it embeds.
    """

    def __init__(self, network: Network) -> None:
        """Find the parts of a network.

        Raises:
            UnsupportedModelError: The model has another structure.
        """
        language_model = getattr(network, "language_model", network)
        decoder: Network = getattr(language_model, "model", None)
        if not all(hasattr(decoder, name) for name in ("embed_tokens", "layers", "norm")):
            raise UnsupportedModelError(
                "the model has no embeddings, layers and norm where heads expect them"
            )
        self.embed = decoder.embed_tokens
        self.layers: Sequence[Network] = decoder.layers
        self.norm = decoder.norm
        self.project = getattr(language_model, "lm_head", None) or self.embed.as_linear
        self.width: int = self.norm.weight.shape[0]
        self.vocab_size: int = self.embed.weight.shape[0]


class HeadNetwork(ABC):
    """A head as a network of the engine: ids [B, T] and the caches -> logits [B, T, V].

    Attributes:
        tapped: The modules of the model whose states it reads.
    """

    def __init__(
        self,
        head: Network,
        target: Target,
        tapped: Sequence[Network],
        *,
        masks_are_arrays: bool = False,
        layer_cache: Callable[[], Any] = KVCache,
    ) -> None:
        """Wrap a module of upstream.

        Args:
            head: A module with `layers`, a `norm` and perhaps its own embeddings.
            target: The parts of the model.
            tapped: The modules of the model whose states it reads.
            masks_are_arrays: Whether its attention needs masks as arrays, as MLA does.
            layer_cache: Creates the empty cache of one of its layers.
        """
        self.tapped = tapped
        self._before: mx.array | None = None
        self._after: list[mx.array] = []
        self._head = head
        self._embed = head.get("embed_tokens") or target.embed
        self._masks_are_arrays = masks_are_arrays
        self._layer_cache = layer_cache
        self._width = target.width * len(tapped)

    def show(self, before: mx.array) -> None:
        """Set the states of the tokens before the next inputs, which may come in several calls.

        Args:
            before: States of the model [B, T, N * D], those of all modules concatenated, or states
                of the head [B, T, D].
        """
        self._before, self._after = before, []

    @property
    def after(self) -> mx.array:
        """The states [B, T, D] of the head for all inputs since the last call of `show`."""
        return mx.concatenate(self._after, axis=1) if len(self._after) > 1 else self._after[0]

    def make_cache(self) -> list[Any]:
        """Return the empty caches of one sequence."""
        return [self._layer_cache() for _ in self._head.layers]

    def parameters(self) -> Arrays:
        """Return the head's own weights as a tree."""
        return self._head.parameters()

    @property
    def state(self) -> Arrays:
        """All arrays of the head."""
        return self._head.state

    @property
    def token_bytes(self) -> int:
        """Size of the model's states of a token, which are kept until the head has read them."""
        size: int = self._head.norm.weight.dtype.size
        return self._width * size

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Append tokens to the caches, each with the state before it, and return the logits."""
        embedded = self._embed(inputs)
        before = self._next_states(inputs, embedded.dtype)
        # Of a layer with several caches, the first has its keys.
        keys = getattr(cache[0], "caches", cache)[0]
        mask = create_attention_mask(embedded, keys, return_array=self._masks_are_arrays)
        after, logits = self._read(embedded, before, mask, cache)
        self._after.append(after)
        return logits

    def _next_states(self, inputs: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the states shown for these inputs; zeros if none were, as in a trial."""
        shown, width = self._before, inputs.shape[1]
        if shown is None:
            shown, self._after = mx.zeros((*inputs.shape, self._width), dtype), []
        self._before = shown[:, width:] if shown.shape[1] > width else None
        return shown[:, :width]

    @abstractmethod
    def _read(
        self, embedded: mx.array, before: mx.array, mask: object, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        """Return the head's own states [B, T, D], and the logits [B, T, V]."""


class HiddenTap:
    """Keeps the outputs of some modules of a network in its latest pass."""

    def __init__(self, modules: Sequence[Network]) -> None:
        """Watch modules of a network whose weights are in memory."""
        self._count = len(modules)
        self._latest: dict[int, mx.array] = {}
        for place, module in enumerate(modules):
            module.__class__ = _tapped(type(module), self._latest, place)

    def take(self) -> Sequence[mx.array]:
        """Return the hidden states [B, T, D] of each module in the latest pass, and forget them.

        They may be lazy. Empty if no pass was made since the last call.
        """
        states = [self._latest.pop(place, None) for place in range(self._count)]
        found = [each for each in states if each is not None]
        return found if len(found) == self._count else ()


def _tapped(kind: type, latest: dict[int, mx.array], place: int) -> type:
    """Return a subclass that stores its output in `latest`; of a tuple, the first element."""

    def call(self: Network, *args: object, **named: object) -> object:
        returned = kind.__call__(self, *args, **named)
        latest[place] = returned[0] if isinstance(returned, tuple) else returned
        return returned

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def read_head_config(directory: Path) -> dict[str, Any]:
    """Return the content of the config.json of a head, which need not name a model type.

    Raises:
        LoadError: It cannot be read, or has an impossible value.
    """
    path = directory / CONFIG_NAME
    config = read_json(path, dict)
    require_sensible(path, config)
    return config


def read_weights(directory: Path, rename: Callable[[str], str | None]) -> dict[str, mx.array]:
    """Return the weights of a directory, lazily.

    Args:
        directory: The directory of the head, or of the checkpoint that contains it.
        rename: Returns a weight's name in the head's network; `None` for other weights.
    """
    found: dict[str, mx.array] = {}
    for path in sorted(directory.glob(WEIGHTS_PATTERN)):
        for name, weight in mx.load(str(path)).items():
            if (own := rename(name)) is not None:
                found[own] = weight
    return found


def load_weights(
    head: Network, weights: Mapping[str, mx.array], quantization: Mapping[str, Any] | None
) -> None:
    """Set the weights of a head, lazily.

    Args:
        head: Upstream's module.
        weights: All its weights.
        quantization: The quantisation given by config.json, if any.

    Raises:
        ValueError: The weights do not match the head.
    """
    names = ("group_size", "bits", "mode")
    if chosen := {name: value for name, value in (quantization or {}).items() if name in names}:
        nn.quantize(head, **chosen, class_predicate=lambda path, _: f"{path}.scales" in weights)
    head.load_weights(list(weights.items()))
