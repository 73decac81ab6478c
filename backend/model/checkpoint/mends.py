"""Fixes bugs in the model code of mlx-lm 0.32 and mlx-vlm 0.7, on networks built with it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import mlx.core as mx

from backend.model.checkpoint.upstream import Network

# Upstream's own values.
Untyped: TypeAlias = Any

_GROUPED_AXES = 5
_MASKS, _FEATURES = "visual_pos_masks", "deepstack_visual_embeds"


def mend(network: Network) -> None:
    """Fix the known bugs of a network's code."""
    if put_right := _MENDS.get(type(network).__module__):
        put_right(network)


def _take_masks_of_batches(network: Network) -> None:
    """Let attention with scores [B, G, H, T, S] take masks [B, 1, T, S].

    Upstream broadcasts the batch rows along the groups of heads.
    """
    for layer in network.layers:
        attention = layer.self_attn
        if attention.repeats > 1:
            attention.__class__ = _masked_by_row(type(attention))


def _masked_by_row(kind: type) -> type:
    def call(
        self: Untyped, x: mx.array, mask: mx.array | None = None, cache: Untyped = None
    ) -> mx.array:
        if mask is not None and mask.ndim == _GROUPED_AXES - 1:
            mask = mask[:, :, None]
        output: mx.array = kind.__call__(self, x, mask, cache)
        return output

    return _derived(kind, call)


def _scale_embeddings(model: Network) -> None:
    """Let `get_input_embeddings` scale tokens by the root of the width, as the decoder does.

    Upstream's prompts are not scaled, and its replies are.
    """
    decoder = model.language_model.model
    embedding = decoder.embed_tokens
    embedding.__class__ = _scaled(type(embedding), decoder.hidden_size**0.5)
    decoder.__class__ = _given_embeddings(type(decoder))


def _scaled(kind: type, factor: float) -> type:
    def call(self: Untyped, token_ids: mx.array) -> mx.array:
        output: mx.array = kind.__call__(self, token_ids) * factor
        return output

    return _derived(kind, call)


def _given_embeddings(kind: type) -> type:
    """Return a class of decoders that never scale embeddings themselves."""

    def call(
        self: Untyped,
        inputs: mx.array | None = None,
        inputs_embeds: mx.array | None = None,
        **others: Untyped,
    ) -> mx.array:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(inputs)
        output: mx.array = kind.__call__(self, inputs, inputs_embeds, **others)
        return output

    return _derived(kind, call)


def _place_features(model: Network) -> None:
    """Let the features of a picture begin after tokens that the caches hold.

    Upstream slices them by the length of the caches, as if they were those of a whole prompt.
    """
    decoder = model.language_model.model
    decoder.__class__ = _fed_in_parts(type(decoder))


def _fed_in_parts(kind: type) -> type:
    def call(self: Untyped, inputs: mx.array, *, cache: Untyped, **others: Untyped) -> mx.array:
        masks, features = (others.get(name) for name in (_MASKS, _FEATURES))
        if masks is not None and masks.shape[-1] == inputs.shape[-1]:
            before = (cache[0].offset, 0)
            others[_MASKS] = mx.pad(masks, [(0, 0), before])
            others[_FEATURES] = mx.pad(features, [(0, 0), before, (0, 0)])
        output: mx.array = kind.__call__(self, inputs, cache=cache, **others)
        return output

    return _derived(kind, call)


def _derived(kind: type, call: Callable[..., mx.array]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


_MENDS: Mapping[str, Callable[[Network], None]] = {
    "mlx_lm.models.gemma2": _take_masks_of_batches,
    "mlx_vlm.models.gemma3n.gemma3n": _scale_embeddings,
    "mlx_vlm.models.granite4_vision.granite4_vision": _place_features,
}
