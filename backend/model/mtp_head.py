"""Heads that predict the token after the next (MTP), as checkpoints of some families bring them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from backend.errors import UnsupportedModelError
from backend.model.checkpoint.config import (
    WEIGHTS_INDEX,
    WEIGHTS_PATTERN,
    read_config,
    read_json,
    require_weights,
)
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, as_load_error
from backend.model.checkpoint.libraries import is_installed
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import cast, widen_experts

# Heads that a checkpoint of their own holds, and the families whose checkpoints bring such a head.
FAMILIES: Mapping[str, frozenset[str]] = {
    "qwen3_5_mtp": frozenset(
        {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"}
    ),
}
_PREFIX = "mtp."

# Arrays in nested dicts and lists, as MLX keeps them.
Arrays: TypeAlias = Any


class HiddenTap:
    """Keeps what a network made of its latest tokens before it turned it into logits.

    Attributes:
        latest: Hidden states [B, T, D] of the latest pass, lazily; `None` once they are taken.
    """

    def __init__(self, network: Network) -> None:
        """Watch a network, whose weights are in memory.

        Raises:
            UnsupportedModelError: It is built in another way than those that bring a head.
        """
        self.latest: mx.array | None = None
        norm = _decoder(network).norm
        norm.__class__ = _tapped(type(norm), self)

    def take(self) -> mx.array | None:
        """Return the states of the latest pass, once."""
        latest, self.latest = self.latest, None
        return latest


def _tapped(kind: type, tap: HiddenTap) -> type:
    """Return the class of norms that leave with a tap what they return."""

    def call(self: Network, x: mx.array) -> mx.array:
        states: mx.array = kind.__call__(self, x)
        tap.latest = states
        return states

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class MtpNetwork:
    """A head as the engine takes networks: ids [B, T] and the caches -> logits [B, T, V].

    Attributes:
        before: Hidden states [B, T, D] of the tokens before the inputs of the next call; zeros if
            nobody sets them.
        after: Those that the head has made of the inputs of the latest call.
    """

    def __init__(self, head: Network, network: Network) -> None:
        """Read and write with the embeddings and the output of the model.

        Raises:
            UnsupportedModelError: The head was trained with another.
        """
        self.before: mx.array | None = None
        self.after: mx.array | None = None
        self._head = head
        decoder, lm = _decoder(network), _language_model(network)
        self._embed = decoder.embed_tokens
        self._project = getattr(lm, "lm_head", None) or decoder.embed_tokens.as_linear
        width, own = decoder.norm.weight.shape[0], head.norm.weight.shape[0]
        if width != own:
            raise UnsupportedModelError(
                f"the MTP head is for states of {own} numbers, and the model has {width}"
            )

    def make_cache(self) -> list[Any]:
        """Return the empty caches of one sequence."""
        return [KVCache() for _ in self._head.layers]

    def parameters(self) -> Arrays:
        """Return the head's own weights as a tree."""
        return self._head.parameters()

    @property
    def state(self) -> Arrays:
        """All arrays of the head."""
        return self._head.state

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Append tokens to the caches, each with the state before it, and return the logits."""
        head, embedded = self._head, self._embed(inputs)
        before = mx.zeros_like(embedded) if self.before is None else self.before
        self.before = None
        pairs = [head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(before)]
        states = head.fc(mx.concatenate(pairs, axis=-1))
        mask = create_attention_mask(states, cache[0])
        for layer, layer_cache in zip(head.layers, cache, strict=True):
            states = layer(states, mask=mask, cache=layer_cache)
        self.after = head.norm(states)
        logits: mx.array = self._project(self.after)
        return logits


def is_head(directory: Path) -> bool:
    """Tell whether a directory holds nothing but a head."""
    return read_config(directory).get("model_type") in FAMILIES


def brings_head(directory: Path) -> bool:
    """Tell whether a checkpoint brings a head that can be used; reads no weights."""
    config = read_config(directory)
    types = {config.get("model_type"), (config.get("text_config") or {}).get("model_type")}
    if not types.intersection(*FAMILIES.values()) or not is_installed("mlx_vlm"):
        return False
    return any(name.startswith(_PREFIX) for name in _weight_names(directory))


def build_head(directory: Path, network: Network, dtype: str | None) -> MtpNetwork:
    """Return the head that a directory holds, alone or beside its model; no weight is in memory.

    Raises:
        LoadError: Says in a user's words what is wrong.
    """
    require_weights(directory)
    try:
        from mlx_vlm.speculative.drafters import load_drafter

        head, _ = load_drafter(str(directory), "mtp", lazy=True)
    except UPSTREAM_FAILURES as failure:
        raise as_load_error(failure, directory) from failure
    if dtype is not None:
        cast(head, dtype)
    widen_experts(head)
    return MtpNetwork(head, network)


def _weight_names(directory: Path) -> set[str]:
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        return set(read_json(index, dict).get("weight_map", {}))
    return {name for path in directory.glob(WEIGHTS_PATTERN) for name in mx.load(str(path))}


def _language_model(network: Network) -> Network:
    return getattr(network, "language_model", network)


def _decoder(network: Network) -> Network:
    """Return the part that embeds tokens and ends in a norm."""
    decoder: Network = getattr(_language_model(network), "model", None)
    if not hasattr(decoder, "embed_tokens") or not hasattr(decoder, "norm"):
        raise UnsupportedModelError("an MTP head of another family cannot draft for it")
    return decoder
