"""EAGLE-3 heads: separate checkpoints that read the hidden states of three layers of a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.rope_utils import initialize_rope

from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import cast_weights
from backend.model.heads.network import (
    Arrays,
    HeadNetwork,
    Target,
    load_weights,
    read_head_config,
    read_weights,
)

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER, _EXTRAS = "transformer_layer_config", "eagle_config"
# The number of layers whose states the network takes.
_TAPS = 3


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json belongs to an EAGLE-3 head."""
    names = (config.get("model_type"), config.get("speculators_model_type"))
    architectures = config.get("architectures") or ()
    return "eagle3" in names or any("eagle3" in str(name).lower() for name in architectures)


def layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the head's own layer."""
    found: Mapping[str, Any] = config.get(_LAYER) or config
    return found


def head_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the fields of mlx-vlm's `Eagle3Config`.

    Args:
        config: The config.json of the head.
        layers: The number of layers of the model.

    Raises:
        UnsupportedModelError: The model has too few, or the head is of another kind.
    """
    extras = config.get(_EXTRAS) or {}
    if extras.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            "the EAGLE-3 head reads the last hidden states only (use_aux_hidden_state is false)"
        )
    layer = layer_config(config)
    if layer.get("kv_lora_rank"):
        raise UnsupportedModelError("the EAGLE-3 head has MLA (kv_lora_rank)")
    ids = _boundaries(config.get(_LAYER_IDS) or extras.get(_LAYER_IDS), layers)
    return {
        **extras,
        **config,
        "draft_vocab_size": config.get("draft_vocab_size") or layer.get("vocab_size"),
        _LAYER: dict(layer),
        "target_layer_ids": ids,
        "capture_layer_ids": [each - 1 for each in ids],
    }


def _boundaries(named: Sequence[int] | None, layers: int) -> list[int]:
    """Return the counts of layers of the model after which the head reads the states."""
    ids = list(named or (2, layers // 2, layers - 3))
    # Some trainers list the layers whose outputs are read, counted from 0; the first is 1.
    first = 1 if named and ids[0] == 1 else 0
    found = [each + first for each in ids]
    if len(found) != _TAPS or not all(0 < each <= layers for each in found):
        raise UnsupportedModelError(
            f"the EAGLE-3 head reads states after layers {', '.join(map(str, found))}, "
            f"and the model has {layers}"
        )
    return found


# Prefixes of weight names in other layouts, and their replacements.
_RENAMED = (("model.", ""), ("midlayer.", "layers.0."))
_EMBEDDINGS, _OUTPUT, _IDS = "embed_tokens", "lm_head", "d2t"
_ROPES = ("rope_scaling", "rope_parameters")


class EagleNetwork(HeadNetwork):
    """Reads the states of three layers; has its own output projection and vocabulary."""

    def __init__(self, head: Network, network: Network) -> None:
        """Create a drafter for a network.

        Raises:
            LoadError: The head was trained with another model.
        """
        target = Target(network)
        _require_fit(head, target)
        _require_known(head, target.vocab_size)
        super().__init__(head, target, [target.layers[n] for n in head.config.capture_layer_ids])
        shared = self._embed.as_linear if head.config.tie_word_embeddings else target.project
        self._project = head.get(_OUTPUT) or shared
        self._places = _places(head, target.vocab_size)

    @property
    def state(self) -> Arrays:
        """All arrays of the head."""
        return [self._head.state, self._places]

    def _read(
        self, embedded: mx.array, before: mx.array, mask: object, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        head = self._head
        states = before if before.shape[-1] == head.hidden_size else self._fused(before)
        (first, first_cache), *others = zip(head.layers, cache, strict=True)
        states = first(embedded, states, mask, first_cache, None)
        for layer, layer_cache in others:
            states = layer(states, mask, layer_cache, None)
        return states, self._widened(self._project(head.norm(states)))

    def _fused(self, before: mx.array) -> mx.array:
        """Project states of the model to the width of the head."""
        norm = self._head.input_norm
        fused: mx.array = self._head.fc(before if norm is None else norm(before))
        return fused

    def _widened(self, logits: mx.array) -> mx.array:
        """Expand logits to the vocabulary of the model; tokens unknown to the head get -inf."""
        if self._places is None:
            return logits
        none = mx.full((*logits.shape[:-1], 1), -mx.inf, logits.dtype)
        return mx.concatenate([logits, none], axis=-1)[..., self._places]


def build_eagle(directory: Path, network: Network, dtype: str | None) -> EagleNetwork:
    """Return the EAGLE-3 head of a directory, with weights still on disk.

    Raises:
        LoadError: It is for another model; other failures are those of upstream.
    """
    config = read_head_config(directory)
    head = _built(config, Target(network), read_weights(directory, _renamed))
    if dtype is not None:
        cast_weights(head, dtype)
    return EagleNetwork(head, network)


def _built(config: Mapping[str, Any], target: Target, weights: dict[str, mx.array]) -> Network:
    from mlx_vlm.speculative.drafters.eagle3 import Model, ModelConfig

    head = Model(ModelConfig.from_dict(head_config(config, len(target.layers))))
    _leave_to_the_model(head, target, weights)
    _scale_positions(head, layer_config(config))
    load_weights(head, head.sanitize(weights), config.get("quantization"))
    return head


def _renamed(name: str) -> str:
    for old, new in _RENAMED:
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return name


def _leave_to_the_model(head: Network, target: Target, weights: dict[str, mx.array]) -> None:
    """Remove the weights that a head shares with the model: a copy would double their memory."""
    is_as_wide = head.hidden_size == target.width
    is_whole = not head.uses_draft_vocab
    shared = {
        _EMBEDDINGS: is_as_wide and not head.config.embed_requires_grad,
        _OUTPUT: is_as_wide and is_whole and f"{_OUTPUT}.weight" not in weights,
        _IDS: is_whole,
    }
    for name in [name for name, is_shared in shared.items() if is_shared]:
        head.pop(name, None)
        for own in [each for each in weights if each.split(".")[0] == name]:
            del weights[own]


def _scale_positions(head: Network, layer: Mapping[str, Any]) -> None:
    """Scale the rotary embeddings as in training: mlx-vlm 0.7 omits the scaling."""
    scaling = next(filter(None, map(layer.get, _ROPES)), None)
    if scaling is None:
        return
    for each in head.layers:
        text = each.self_attn.config
        each.self_attn.rope = initialize_rope(
            each.self_attn.head_dim,
            text.rope_theta,
            text.rope_traditional,
            scaling,
            text.max_position_embeddings,
        )


def _require_fit(head: Network, target: Target) -> None:
    own, known = head.target_hidden_size, head.target_vocab_size
    if own != target.width:
        raise UnsupportedModelError(
            f"the EAGLE-3 head is for states of {own} numbers, and the model has {target.width}"
        )
    if known != target.vocab_size:
        raise UnsupportedModelError(
            f"the EAGLE-3 head is for a vocabulary of {known} tokens, and the model has "
            f"{target.vocab_size}"
        )


def _require_known(head: Network, vocab_size: int) -> None:
    if (ids := _drafted_ids(head)) is None:
        return
    least, most = mx.min(ids).item(), mx.max(ids).item()
    if not 0 <= least <= most < vocab_size:
        raise LoadError(
            f"the EAGLE-3 head drafts the ids {least} to {most} (d2t), and the model has "
            f"{vocab_size}"
        )


def _drafted_ids(head: Network) -> mx.array | None:
    """Return the ids [N] of the tokens that a head can draft; `None` if it can draft all."""
    return mx.arange(head.draft_vocab_size) + head.d2t if head.uses_draft_vocab else None


def _places(head: Network, vocab_size: int) -> mx.array | None:
    """Return the index of the logit of each token [V]; one past the end for a token without one."""
    if (ids := _drafted_ids(head)) is None:
        return None
    places = mx.full((vocab_size,), head.draft_vocab_size, mx.int32)
    places[ids] = mx.arange(head.draft_vocab_size)
    return places
