"""Mends of the libraries' model code: bugs, and what only knows one row or rows of one length.

A mend gives a module of a network a class derived from its own. Every one has a test that fails
once upstream makes it needless.
"""

import sys
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


def _count_rows(model: Network) -> None:
    """Let gpt_bigcode embed the positions of each row; upstream knows those of one row."""
    decoder = model.transformer
    decoder.__class__ = _placed_by_row(type(decoder))


def _placed_by_row(kind: type) -> type:
    def call(self: Untyped, inputs: mx.array, cache: Untyped = None) -> Untyped:
        if not _has_rows(cache):
            return kind.__call__(self, inputs, cache)
        hidden = self.wte(inputs) + self.wpe(_positions(cache[0].offset, inputs.shape[1]))
        mask = cache[0].make_mask(inputs.shape[1])
        for layer, own in zip(self.h, cache, strict=True):
            hidden = layer(hidden, mask, cache=own)
        return self.ln_f(hidden)

    return _derived(kind, call)


def _turn_rows(model: Network) -> None:
    """Let the rotary embeddings of jina_vlm take a position for each row."""
    for layer in model.language_model.layers:
        rope = layer.attn.rope
        rope.__class__ = _turning_rows(type(rope))


def _turning_rows(kind: type) -> type:
    def call(self: Untyped, x: mx.array, offset: Untyped = 0) -> mx.array:
        if isinstance(offset, mx.array):
            return _turned(x, offset, self._inv_freq, mx.float32)
        output: mx.array = kind.__call__(self, x, offset)
        return output

    return _derived(kind, call)


def _turn_attended_rows(model: Network) -> None:
    """Let hunyuan_vl read tokens at a position for each row, in all axes the same."""
    language_model = model.language_model
    language_model.__class__ = _reading_rows(type(language_model))
    for layer in language_model.layers:
        layer.self_attn.__class__ = _attending_rows(type(layer.self_attn))


def _reading_rows(kind: type) -> type:
    outputs = sys.modules[kind.__module__].LanguageModelOutput

    def call(
        self: Untyped, inputs: mx.array | None = None, *, cache: Untyped, **others: Untyped
    ) -> Untyped:
        if not _has_rows(cache):
            return kind.__call__(self, inputs, cache=cache, **others)
        hidden = self.model(input_ids=inputs, cache=cache)
        is_tied = self.args.tie_word_embeddings
        head = self.model.embed_tokens.as_linear if is_tied else self.lm_head
        return outputs(logits=head(hidden))

    return _derived(kind, call)


def _attending_rows(kind: type) -> type:
    module = sys.modules[kind.__module__]

    def call(
        self: Untyped, x: mx.array, mask: Untyped, cache: Untyped, position_ids: Untyped = None
    ) -> Untyped:
        if not _has_rows([cache]):
            return kind.__call__(self, x, mask, cache, position_ids)
        offset, frequencies = cache.offset, self.rotary_emb._inv_freq  # noqa: SLF001
        queries, keys, values = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = (_turned(each, offset, frequencies, x.dtype) for each in (queries, keys))
        if self.config.use_qk_norm:
            queries, keys = self.query_layernorm(queries), self.key_layernorm(keys)
        kept = cache.update_and_fetch(keys, values)
        attended = module.scaled_dot_product_attention(
            queries, *kept, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(attended.swapaxes(1, 2).flatten(2))

    return _derived(kind, call)


def _has_rows(cache: Untyped) -> bool:
    """Tell whether caches belong to several rows, each with its own position."""
    return cache is not None and isinstance(getattr(cache[0], "offset", None), mx.array)


def _positions(offset: mx.array, width: int) -> mx.array:
    """Return the positions [B, width] of the next tokens of rows."""
    return offset[:, None] + mx.arange(width)


def _turned(x: mx.array, offset: mx.array, frequencies: mx.array, exact: mx.Dtype) -> mx.array:
    """Return [B, heads, width, n] turned by the positions of each row, halves as pairs.

    Args:
        exact: The type to which sines and cosines are rounded.
    """
    angles = _positions(offset, x.shape[2])[:, None, :, None] * frequencies
    cosines, sines = (
        mx.tile(each.astype(exact).astype(mx.float32), 2)
        for each in (mx.cos(angles), mx.sin(angles))
    )
    first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
    turned = mx.concatenate([first, second], axis=-1) * cosines
    turned += mx.concatenate([-second, first], axis=-1) * sines
    return turned.astype(x.dtype)


def _derived(kind: type, call: Callable[..., mx.array]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


_MENDS: Mapping[str, Callable[[Network], None]] = {
    "mlx_lm.models.gemma2": _take_masks_of_batches,
    "mlx_lm.models.gpt_bigcode": _count_rows,
    "mlx_vlm.models.gemma3n.gemma3n": _scale_embeddings,
    "mlx_vlm.models.granite4_vision.granite4_vision": _place_features,
    "mlx_vlm.models.hunyuan_vl.hunyuan_vl": _turn_attended_rows,
    "mlx_vlm.models.jina_vlm.jina_vlm": _turn_rows,
}
