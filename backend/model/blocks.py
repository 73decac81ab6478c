"""Drafters that write a block of tokens in one pass: DFlash, DFlash 2, DSpark, Muse's assistant.

They attend to the hidden states of the model that they have read, and to all tokens of the block,
of which only the first is known. mlx-vlm has their modules, with caches of rows of one length;
their attention is replaced by one over rows of unlike lengths.
"""

import importlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn

from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import Network, derived
from backend.model.device import DEVICE
from backend.model.heads import (
    HeadWeights,
    StateReader,
    Target,
    block_type,
    load_weights,
    read_head_config,
    read_weights,
)

Pair: TypeAlias = tuple[mx.array, mx.array]
"""Keys and values [B, heads, positions, width] of a layer."""

_EXTRAS = "dflash_config"
_LAYERS, _IDS = "num_target_layers", "target_layer_ids"
# Upstream's methods that prepare the states read, where that is more than a projection and a norm.
_PREPARES = ("prepare_target_hidden", "_combine_hidden")


@dataclass(frozen=True, slots=True)
class Kept:
    """The read positions of the rows; a layer attends to them and to the tokens of the block.

    Attributes:
        pair: Of the read positions, padded on the right.
        lengths: [B] positions of each row.
    """

    pair: Pair
    lengths: mx.array
    draft_window: int | None

    def attend(self, attention: Network, hidden: mx.array, rope: Network) -> mx.array:
        """Return the output [B, L, D] of an attention for the tokens of a block."""
        rows, width, _ = hidden.shape
        queries = attention.q_norm(_heads(attention.q_proj(hidden), attention.n_heads))
        queries = rope(queries.transpose(0, 2, 1, 3), offset=self.lengths)
        own = projected(attention, hidden, rope, self.lengths)
        keys, values = (mx.concatenate(pair, axis=2) for pair in zip(self.pair, own, strict=True))
        output = DEVICE.attend(
            queries,
            keys,
            values,
            scale=attention.scale,
            mask=self._mask(attention, width),
            sinks=getattr(attention, "attention_sink_bias", None),
        )
        output = output.transpose(0, 2, 1, 3)
        if "g_proj" in attention:
            gates = nn.softplus(attention.g_proj(hidden).astype(mx.float32))
            output = output * gates.astype(output.dtype)[..., None]
        return attention.o_proj(output.reshape(rows, width, -1))

    def _mask(self, attention: Network, width: int) -> mx.array:
        """Return the visible positions [B, 1, L, positions + L]."""
        is_causal = getattr(attention, "is_causal", False) or getattr(attention, "causal", False)
        lengths, place = self.lengths[:, None, None, None], mx.arange(width)[:, None]
        positions = mx.arange(self.pair[0].shape[2])
        seen = mx.broadcast_to(positions < lengths, (*lengths.shape[:2], width, len(positions)))
        if (window := attention.sliding_window) is not None:
            reach, moves = _window(attention, window)
            seen &= positions >= lengths - reach + (place if moves else 0)
        if self.draft_window:
            seen &= positions >= lengths - self.draft_window
        block = mx.arange(width) <= place if is_causal else mx.ones((width, width), mx.bool_)
        block = mx.broadcast_to(block, (*lengths.shape[:2], width, width))
        return mx.concatenate([seen, block], axis=-1)


def _window(attention: Network, window: int) -> tuple[int, bool]:
    """Return how far back a window reaches, and whether from each token of the block."""
    if hasattr(attention, "causal"):
        return window - 1, False
    if hasattr(attention, "is_causal"):
        return window - 1, attention.is_causal
    # It counts both ends.
    return window, True


def projected(attention: Network, hidden: mx.array, rope: Network, first: mx.array) -> Pair:
    """Return the keys and values of tokens [B, L, D], whose positions begin at `first` [B]."""
    if hasattr(attention, "_project_kv"):
        keys, values = attention._project_kv(hidden)  # noqa: SLF001 (for subclasses of upstream)
    else:
        keys, values = attention.k_proj(hidden), attention.v_proj(hidden)
    keys = attention.k_norm(_heads(keys, attention.n_kv_heads)).transpose(0, 2, 1, 3)
    values = _heads(values, attention.n_kv_heads).transpose(0, 2, 1, 3)
    return rope(keys, offset=first), values


def _heads(array: mx.array, heads: int) -> mx.array:
    return array.reshape(*array.shape[:2], heads, -1)


def _divide(attention: Network) -> None:
    """Give an attention that projects at once the parts of that projection."""
    whole = attention.pop("qkv_proj", None)
    if whole is None:
        return
    keys = attention.n_kv_heads * attention.head_dim
    first = attention.n_heads * attention.head_dim
    bounds = {"q_proj": (0, first), "k_proj": (first, first + keys)}
    for name, (start, stop) in (bounds | {"v_proj": (first + keys, first + 2 * keys)}).items():
        part = copy(whole)
        part.update({key: array[start:stop] for key, array in whole.items()})
        attention[name] = part


def _over_kept(kind: type) -> type:
    """Return a subclass of an attention that attends to `Kept`."""

    def call(
        self: Network, hidden: mx.array, _: object, rope: Network, kept: Kept, *__: object
    ) -> mx.array:
        return kept.attend(self, hidden, rope)

    return derived(kind, __call__=call)


class BlockNetwork(StateReader):
    """Reads states of some layers; writes a block of tokens.

    Attributes:
        most_tokens: Of a block, without the known one.
    """

    def __init__(self, head: Network, network: Network, config: Mapping[str, Any]) -> None:
        """Create a drafter for a network.

        Args:
            config: The content of its config.json.

        Raises:
            UnsupportedModelError: It is for another one.
        """
        target = Target(network)
        own = head.config
        _require_fit(own, config, target)
        ids, dtype = own.target_layer_ids, head.norm.weight.dtype
        self._width = target.width * len(ids)
        super().__init__(head, [target.layers[n] for n in ids], self._width, dtype)
        self.most_tokens: int = own.block_size - 1
        self._embed, self._scale = _embeddings(head, target)
        self._project = head.get("lm_head") or target.project
        self._dtype = dtype
        attentions = [layer.self_attn for layer in head.layers]
        for each in attentions:
            _divide(each)
            each.__class__ = _over_kept(type(each))
        sizes = (each.n_kv_heads * each.head_dim for each in attentions)
        self.kept_bytes = 2 * sum(sizes) * dtype.size

    def read(self, states: mx.array, first: mx.array) -> list[Pair]:
        """Return the keys and values of tokens in every layer.

        Args:
            states: [B, T, N * D] of the model.
            first: [B] positions of each row before them.
        """
        head = self._head
        for name in _PREPARES:
            if prepare := getattr(head, name, None):
                context = prepare(states)
                break
        else:
            context = head.hidden_norm(head.fc(states))
        return [projected(layer.self_attn, context, head.rope, first) for layer in head.layers]

    def write(
        self, tokens: mx.array, count: int, pairs: Sequence[Pair], lengths: mx.array
    ) -> "Block":
        """Return a block of `count` tokens that may follow each row.

        Args:
            tokens: [B] the latest of each row.
            pairs: Of every layer, the keys and values of each row's read positions.
            lengths: [B] read positions of each row.
        """
        head = self._head
        from_first = getattr(head.config, "sample_from_anchor", False)
        masks = mx.full((len(tokens), count - from_first), head.config.mask_token_id, tokens.dtype)
        inputs = mx.concatenate([tokens[:, None], masks], axis=1)
        hidden = self._embed(inputs) * self._scale
        window = getattr(head.config, "draft_window_size", None)
        for layer, pair in zip(head.layers, pairs, strict=True):
            hidden = layer(hidden, None, head.rope, Kept(pair, lengths, window))
        hidden = head.norm(hidden)[:, 0 if from_first else 1 :]
        return Block(head, hidden, self._logits(hidden))

    def probe(self, width: int) -> mx.array:
        """Return the logits [1, V] of a whole block after `width` tokens."""
        first = mx.array([0])
        pairs = self.read(mx.zeros((1, width, self._width), self._dtype), first)
        block = self.write(first, self.most_tokens, pairs, mx.array([width]))
        return block.logits_after(self.most_tokens - 1, first)

    def _logits(self, hidden: mx.array) -> mx.array:
        config = self._head.config
        logits = self._project(hidden) * getattr(config, "output_multiplier", 1.0)
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits


class Block:
    """A block of tokens that are being drawn, in order."""

    def __init__(self, head: Network, hidden: mx.array, logits: mx.array) -> None:
        """Begin with hidden states [B, L, D] and logits [B, L, V] of all tokens."""
        self._head = head
        self._hidden = hidden
        self._logits = logits

    def logits_after(self, place: int, tokens: mx.array) -> mx.array:
        """Return the logits [B, V] of the token at a place, given the one before it [B]."""
        logits, head = self._logits[:, place], self._head
        if "markov_head" in head:
            return head.markov_head.apply_step_logits(logits, tokens)
        if "candidate_selector" in head:
            return _selected(head.candidate_selector, self._hidden[:, place], logits, tokens)
        return logits


def _selected(selector: Network, hidden: mx.array, logits: mx.array, tokens: mx.array) -> mx.array:
    """Return the scores of the likeliest tokens after others, and -inf for the rest."""
    likely = mx.argpartition(logits, -selector.top_k, axis=-1)[..., -selector.top_k :]
    before = selector.predecessor_codebook(tokens) * selector.hidden_projection(hidden)
    edges = (before[:, None] * selector.successor_codebook(likely)).sum(axis=-1)
    scores = mx.take_along_axis(logits, likely, axis=-1) + edges
    return mx.put_along_axis(mx.full(logits.shape, -mx.inf, scores.dtype), likely, scores, axis=-1)


def _embeddings(head: Network, target: Target) -> tuple[Network, float]:
    """Return the embeddings of a drafter, its own or the model's, and their factor."""
    factor = getattr(head.config, "input_embedding_scale", 1.0)
    own = head.get("embed_tokens")
    if own is not None:
        return own, head.embed_scale * factor
    # Muse's assistant reads the bare table.
    return target.embed, (target.embed_scale if hasattr(head, "embed_scale") else 1.0) * factor


def _require_fit(own: Any, config: Mapping[str, Any], target: Target) -> None:  # noqa: ANN401
    """Check the fields of a drafter's config.json that say which model it is for."""
    layers = len(target.layers)
    found = {
        "hidden_size": (own.hidden_size, target.width),
        "vocab_size": (own.vocab_size, target.vocab_size),
    }
    if named := (config.get(_EXTRAS) or {}).get(_LAYERS) or config.get(_LAYERS):
        found[_LAYERS] = named, layers
    for name, (theirs, ours) in found.items():
        if theirs != ours:
            raise UnsupportedModelError(
                f"the drafter is for another model: its {name} is {theirs}, and {ours} here"
            )
    if not own.target_layer_ids or not all(0 <= n < layers for n in own.target_layer_ids):
        ids = ", ".join(map(str, own.target_layer_ids))
        raise UnsupportedModelError(
            f"the drafter reads the layers {ids} ({_IDS}), and the model has {layers}"
        )
    if not 0 <= own.mask_token_id < target.vocab_size or own.block_size <= 1:
        raise UnsupportedModelError(
            f"the drafter's mask_token_id is {own.mask_token_id} and its block_size "
            f"{own.block_size}, which the model cannot use"
        )


def build_block(directory: Path, network: Network, form: HeadWeights) -> BlockNetwork:
    """Return the drafter in a directory, with weights still on disk."""
    config = read_head_config(directory)
    family = importlib.import_module(f"mlx_vlm.speculative.drafters.{block_type(config)}")
    head = family.Model(family.ModelConfig.from_dict(config))
    weights = head.sanitize(read_weights(directory, lambda name: name))
    load_weights(head, weights, config.get("quantization"))
    form.settle(head)
    return BlockNetwork(head, network, config)
