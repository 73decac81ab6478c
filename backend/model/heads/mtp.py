"""Heads that predict the token after the next (MTP), part of the checkpoints of some families."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import CacheList, KVCache

from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import cast_weights
from backend.model.device import DEVICE
from backend.model.heads.network import (
    HeadNetwork,
    Target,
    load_weights,
    read_head_config,
    read_weights,
)


class MtpNetwork(HeadNetwork):
    """Reads the last states of the model; uses its output projection or its own."""

    def __init__(self, head: Network, network: Network, **attention: Any) -> None:  # noqa: ANN401
        """Create a drafter for a network.

        Args:
            head: Upstream's module.
            network: The model.
            attention: `masks_are_arrays` and `layer_cache` of a `HeadNetwork`.

        Raises:
            UnsupportedModelError: The head was trained with another model.
        """
        target = Target(network)
        own = head.norm.weight.shape[0]
        if target.width != own:
            raise UnsupportedModelError(
                f"the MTP head is for states of {own} numbers, and the model has {target.width}"
            )
        super().__init__(head, target, [target.norm], **attention)
        self._project = head.get("lm_head") or target.project
        _require_vocab(head, target.vocab_size)

    def _read(
        self, embedded: mx.array, before: mx.array, mask: object, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        head = self._head
        pairs = [head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(before)]
        states = head.fc(mx.concatenate(pairs, axis=-1))
        for layer, layer_cache in zip(head.layers, cache, strict=True):
            states = layer(states, mask=mask, cache=layer_cache)
        after = head.norm(states)
        return after, self._project(after)


def _require_vocab(head: Network, vocab_size: int) -> None:
    """Check the embeddings and the output of a head that has its own."""
    for name in ("embed_tokens", "lm_head"):
        if name in head and (own := head[name].weight.shape[0]) != vocab_size:
            raise UnsupportedModelError(
                f"the MTP head is for a vocabulary of {own} tokens, and the model has {vocab_size}"
            )


def build_mtp(directory: Path, network: Network, dtype: str | None) -> MtpNetwork:
    """Return the MTP head of a directory, alone or with its model; weights stay on disk.

    Raises:
        UnsupportedModelError: It is for another model; other failures are those of upstream.
    """
    from mlx_vlm.speculative.drafters import load_drafter

    head, _ = load_drafter(str(directory), "mtp", lazy=True)
    if dtype is not None:
        cast_weights(head, dtype)
    DEVICE.widen_experts(head)
    return MtpNetwork(head, network)


# Model types of checkpoints split off by mlx-vlm.
SPLIT_TYPES = frozenset({"glm4_moe_lite_mtp"})
_SPLIT_PREFIX = "model."
# Prefixes of names in checkpoints, and in a model of one layer.
_NAMES = (
    *(("enorm.", "enorm."), ("hnorm.", "hnorm."), ("eh_proj.", "eh_proj.")),
    *(("embed_tokens.", "model.embed_tokens."), ("shared_head.norm.", "model.norm.")),
    *(("shared_head_norm.", "model.norm."), ("shared_head.head.", "lm_head.")),
    *(("lm_head.", "lm_head."), ("mtp_block.", "model.layers.0."), ("", "model.layers.0.")),
)
# Prefixes of names after sanitising, and in the head.
_OWN_NAMES = (
    *(("model.", ""), ("enorm.", "pre_fc_norm_embedding."), ("hnorm.", "pre_fc_norm_hidden.")),
    ("eh_proj.", "fc."),
)


def build_nextn(directory: Path, network: Network, dtype: str | None) -> MtpNetwork:
    """Return the head of a directory, alone or with its model; weights stay on disk.

    Raises:
        LoadError: It is for another model; other failures are those of upstream.
    """
    config = read_head_config(directory)
    text = config.get("text_config") or config
    is_split = config.get("model_type") in SPLIT_TYPES
    prefix = _SPLIT_PREFIX if is_split else f"model.layers.{text['num_hidden_layers']}."
    head = _built(text, config, read_weights(directory, _rename_from(prefix, is_split=is_split)))
    if dtype is not None:
        cast_weights(head, dtype)
    DEVICE.widen_experts(head)
    has_index = "indexer" in head.layers[0].self_attn
    layer_cache = _with_index if has_index else KVCache
    return MtpNetwork(head, network, masks_are_arrays=True, layer_cache=layer_cache)


def _with_index() -> CacheList:
    return CacheList(KVCache(), KVCache())


def _rename_from(prefix: str, *, is_split: bool) -> Callable[[str], str | None]:
    """Return a function that maps names of a checkpoint to those of a model of one layer."""

    def rename(name: str) -> str | None:
        if name.startswith(prefix):
            return _renamed(name.removeprefix(prefix), _NAMES)
        return name if is_split else None

    return rename


def _renamed(name: str, names: tuple[tuple[str, str], ...]) -> str:
    found = ((old, new) for old, new in names if name.startswith(old))
    old, new = next(found, ("", ""))
    return new + name.removeprefix(old)


def _built(
    text: Mapping[str, Any], config: Mapping[str, Any], weights: dict[str, mx.array]
) -> Network:
    family = importlib.import_module(f"mlx_lm.models.{text['model_type']}")
    args = family.ModelArgs.from_dict({**text, "num_hidden_layers": 1, "first_k_dense_replace": 0})
    one_layer = family.Model(args)
    head = _head(one_layer, args.hidden_size, args.rms_norm_eps)
    own = {
        _renamed(name, _OWN_NAMES): weight
        for name, weight in one_layer.sanitize(weights).items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    for shared in ("embed_tokens", "lm_head"):
        if f"{shared}.weight" not in own:
            head.pop(shared)
    load_weights(head, own, config.get("quantization"))
    return head


def _head(one_layer: Network, width: int, eps: float) -> Network:
    """Return the parts of a head under the names that `MtpNetwork` knows."""
    head = nn.Module()
    head.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
    head.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
    head.fc = nn.Linear(2 * width, width, bias=False)
    head.layers = one_layer.model.layers
    head.norm = one_layer.model.norm
    head.embed_tokens = one_layer.model.embed_tokens
    head.lm_head = one_layer.lm_head
    head.cast_predicate = one_layer.cast_predicate
    return head
