"""Mends of the libraries' model code: bugs, and code for only one row or rows of one length.

A mend gives a module of a network a class derived from its own. Every one has a test that fails
once upstream makes it needless.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn

from backend.model.checkpoint.projections import keep_by_row
from backend.model.checkpoint.upstream import Network, derived

# Upstream's own values.
Untyped: TypeAlias = Any

_GROUPED_AXES = 5
_MAMBA = "M"
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
    ) -> Untyped:
        if mask is not None and mask.ndim == _GROUPED_AXES - 1:
            mask = mask[:, :, None]
        return kind.__call__(self, x, mask, cache)

    return derived(kind, __call__=call)


def _compute_gelu_exactly(network: Network) -> None:
    """Let an encoder compute GELU as it was trained: upstream takes the approximation by tanh."""
    for module in network.modules():
        if isinstance(getattr(module, "act", None), nn.GELU):
            module.act = nn.GELU()


def _scale_embeddings(model: Network) -> None:
    """Let `get_input_embeddings` scale tokens by the root of the width, as the decoder does.

    Upstream's prompts are not scaled, and its replies are.
    """
    decoder = model.language_model.model
    embedding = decoder.embed_tokens
    embedding.__class__ = _scaled(type(embedding), decoder.hidden_size**0.5)
    decoder.__class__ = _given_embeddings(type(decoder))


def _scaled(kind: type, factor: float) -> type:
    return derived(kind, __call__=lambda self, token_ids: kind.__call__(self, token_ids) * factor)


def _given_embeddings(kind: type) -> type:
    """Return a class of decoders that never scale embeddings themselves."""

    def call(
        self: Untyped,
        inputs: mx.array | None = None,
        inputs_embeds: mx.array | None = None,
        **others: Untyped,
    ) -> Untyped:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(inputs)
        return kind.__call__(self, inputs, inputs_embeds, **others)

    return derived(kind, __call__=call)


def _place_features(model: Network) -> None:
    """Let the features of a picture begin after tokens that the caches hold.

    Upstream slices them by the length of the caches, as if they were those of a whole prompt.
    """
    decoder = model.language_model.model
    decoder.__class__ = _fed_in_parts(type(decoder))


def _fed_in_parts(kind: type) -> type:
    def call(self: Untyped, inputs: mx.array, *, cache: Untyped, **others: Untyped) -> Untyped:
        masks, features = (others.get(name) for name in (_MASKS, _FEATURES))
        if masks is not None and masks.shape[-1] == inputs.shape[-1]:
            before = (cache[0].offset, 0)
            others[_MASKS] = mx.pad(masks, [(0, 0), before])
            others[_FEATURES] = mx.pad(features, [(0, 0), before, (0, 0)])
        return kind.__call__(self, inputs, cache=cache, **others)

    return derived(kind, __call__=call)


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

    return derived(kind, __call__=call)


def _turn_rows(model: Network) -> None:
    """Let the rotary embeddings of jina_vlm take a position for each row."""
    for layer in model.language_model.layers:
        rope = layer.attn.rope
        rope.__class__ = _turning_rows(type(rope))


def _turning_rows(kind: type) -> type:
    def call(self: Untyped, x: mx.array, offset: Untyped = 0) -> Untyped:
        if isinstance(offset, mx.array):
            return _turned(x, offset, self._inv_freq, mx.float32)
        return kind.__call__(self, x, offset)

    return derived(kind, __call__=call)


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

    return derived(kind, __call__=call)


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

    return derived(kind, __call__=call)


_ATTENTION = "self_attn"

# The named arguments of one row's attention, from its cache, those of all rows, and its place.
RowArguments: TypeAlias = Callable[[Untyped, Mapping[str, Untyped], int], dict[str, Untyped]]


def _attend_row_by_row(arguments: RowArguments, *names: str) -> Callable[[Network], None]:
    """Return a mend that runs attention once for each row, if rows have caches of their own.

    For attention that computes with lengths, blocks or caches of a single row. One token of each
    row at a time, which sees all that its cache keeps.

    Args:
        names: The modules of a layer that take its cache; not every layer has all.
    """

    def put_right(model: Network) -> None:
        decoder = model if hasattr(model, "layers") else model.language_model
        found = (layer[name] for layer in decoder.layers for name in names if name in layer)
        for attention in found:
            attention.__class__ = _one_row_at_a_time(type(attention), arguments)

    return put_right


def _one_row_at_a_time(kind: type, arguments: RowArguments) -> type:
    names = list(inspect.signature(kind.__call__).parameters)[2:]

    def call(self: Untyped, x: mx.array, *given: Untyped, **named: Untyped) -> Untyped:
        named = dict(zip(names, given, strict=False)) | named
        caches = getattr(named["cache"], "row_caches", None)
        if caches is None:
            return kind.__call__(self, x, **named)
        rows = [
            kind.__call__(self, x[place : place + 1], **arguments(cache, named, place))
            for place, cache in enumerate(caches)
        ]
        return mx.concatenate(rows)

    return derived(kind, __call__=call)


def _in_its_chunk(cache: Untyped, _named: Mapping[str, Untyped], _place: int) -> dict[str, Untyped]:
    """Let the next token see its own chunk, of a cache that may keep the end of the one before."""
    chunk = getattr(cache, "chunk_size", None)
    if chunk is None:
        return {"mask": None, "cache": cache}
    cache.maybe_trim_front()
    first, kept_from = cache.offset // chunk * chunk, cache.start_position
    mask = None if first <= kept_from else mx.arange(kept_from, cache.offset + 1)[None] >= first
    return {"mask": mask, "cache": cache}


def _in_its_window(cache: Untyped, named: Mapping[str, Untyped], place: int) -> dict[str, Untyped]:
    """Give a row of deepseek_v41 its positions, and the values its earlier layers have shared."""
    kept = 0 if cache.window is None else cache.window.shape[1]
    last = kept + 1
    return {
        "start_pos": cache.offset,
        "window_idx": mx.arange(max(last - cache.window_size, 0), last)[None, None],
        "cache": cache,
        "shared": named["shared"].setdefault(place, {}),
    }


def _select_blocks_of_rows(model: Network) -> None:
    """Let the padded rows of qwen4_exp attend to the blocks that are selected for each.

    Upstream leaves the selection out in a pass of one token of rows of unlike length.
    """
    decoder = model.language_model
    for layer in decoder.layers:
        if _ATTENTION in layer:
            layer.self_attn.__class__ = _selecting(type(layer.self_attn))
    decoder.__class__ = _decoding_with(type(decoder))


def _decoding_with(kind: type) -> type:
    """Return a class of decoders whose passes of one token select blocks of rows."""
    forward = _selecting_in_batches(sys.modules[kind.__module__].Qwen4ExpBatchInvariantForward)()

    def decode(self: Untyped, inputs: mx.array, **named: Untyped) -> Untyped:
        return forward(self, inputs, **named)

    return derived(kind, _batch_invariant_decode=decode)


def _selecting(kind: type) -> type:
    def call(
        self: Untyped, x: mx.array, mask: Untyped = None, cache: Untyped = None, **others: Untyped
    ) -> Untyped:
        return kind.__call__(self, x, _unless_selecting(self, cache, mask), cache, **others)

    return derived(kind, __call__=call)


def _selecting_in_batches(kind: Untyped) -> type:
    def attend(
        self: Untyped, attention: Untyped, x: mx.array, cache: Untyped, ids: Untyped, mask: Untyped
    ) -> Untyped:
        mask = _unless_selecting(attention, cache, mask)
        return kind._qsa_attention(self, attention, x, cache, ids, mask)  # noqa: SLF001

    return derived(kind, _qsa_attention=attend)


def _unless_selecting(attention: Untyped, cache: Untyped, mask: Untyped) -> Untyped:
    """Return the mask, or none if that of the selection takes its place and hides padding too."""
    if not isinstance(mask, str) or mask != "left_padded_decode":
        return mask
    indexer = attention.indexer
    blocks = (cache.index_offset + 1) // indexer.compress_ratio
    return None if blocks > indexer.block_topk else mask


def _place_states(model: Network) -> None:
    """Let each row of z1t have its own position and state."""
    decoder = model.language_model.model
    decoder.__class__ = _placed_by_state(type(decoder))
    _attend_row_by_row(lambda cache, *_: {"cache": cache}, "attn")(model)


def _placed_by_state(kind: type) -> type:
    def call(
        self: Untyped,
        inputs: mx.array,
        inputs_embeds: mx.array | None = None,
        cache: Untyped = None,
        **others: Untyped,
    ) -> Untyped:
        rows = getattr(cache[0], "row_caches", None) if cache else None
        if rows is None:
            return kind.__call__(self, inputs, inputs_embeds, cache, **others)
        hidden = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
        hidden += mx.stack([self._pos(row.offset, 1, hidden.dtype) for row in rows])
        for layer, own in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, cache=own)
        return self.norm(hidden)

    return derived(kind, __call__=call)


def _end_states(network: Network) -> None:
    """Let the states of nemotron_h end with the last token of each row, not with the padding."""
    for layer in network.layers:
        if layer.block_type == _MAMBA:
            layer.mixer.__class__ = _ending_states(type(layer.mixer))


def _ending_states(kind: type) -> type:
    update = sys.modules[kind.__module__].ssm_update

    def ssm(self: Untyped, hidden: mx.array, *others: Untyped) -> mx.array:
        keys, queries, steps, cache, mask = others
        rows = hidden.shape[:2]
        output, state = update(
            hidden.reshape(*rows, self.num_heads, self.head_dim),
            self.A_log,
            keys.reshape(*rows, self.n_groups, -1),
            queries.reshape(*rows, self.n_groups, -1),
            self.D.astype(hidden.dtype),
            steps,
            self.dt_bias,
            cache[1] if cache else None,
            self.time_step_limit,
            mask,
            cache.lengths if cache else None,
        )
        if cache:
            cache[1] = state
        return output.reshape(*rows, -1)

    return derived(kind, _ssm=ssm)


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


_MENDS: Mapping[str, Callable[[Network], None]] = {
    "mlx_lm.models.deepseek_v41": _attend_row_by_row(_in_its_window, _ATTENTION),
    "mlx_lm.models.gemma2": _take_masks_of_batches,
    "mlx_lm.models.gpt_bigcode": _count_rows,
    "mlx_lm.models.llama4": _attend_row_by_row(_in_its_chunk, _ATTENTION),
    "mlx_lm.models.minimax_m3_vl": _attend_row_by_row(
        lambda cache, *_: {"mask": None, "cache": cache}, _ATTENTION
    ),
    "mlx_lm.models.nemotron_h": _end_states,
    "mlx_vlm.models.gemma3n.gemma3n": _scale_embeddings,
    "mlx_vlm.models.glm5_next.glm5_next": keep_by_row,
    "mlx_vlm.models.granite4_vision.granite4_vision": _place_features,
    "mlx_vlm.models.hunyuan_vl.hunyuan_vl": _turn_attended_rows,
    "mlx_vlm.models.jina_vlm.jina_vlm": _turn_rows,
    "mlx_vlm.models.llama4.llama4": _attend_row_by_row(_in_its_chunk, _ATTENTION),
    "mlx_vlm.models.modernbert.modernbert": _compute_gelu_exactly,
    "mlx_vlm.models.qwen4_exp.qwen4_exp": _select_blocks_of_rows,
    "mlx_vlm.models.z1t.z1t": _place_states,
}
