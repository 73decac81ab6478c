"""Drafters of single families: Gemma 4's assistants, MTP heads of Nemotron-H and GLM-5-Next."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from mlx import nn

from backend.errors import UnsupportedModelError
from backend.model.checkpoint.projections import Projections, projecting
from backend.model.checkpoint.upstream import Network, derived
from backend.model.heads import (
    HeadWeights,
    MtpNetwork,
    StateReader,
    Target,
    load_weights,
    read_head_config,
    read_weights,
)

_WINDOW, _WHOLE = "sliding_attention", "full_attention"
# The field of config.json with the width of attention heads, by the type of a layer.
_HEAD_WIDTHS = {_WINDOW: "head_dim", _WHOLE: "global_head_dim"}
# The keys and values of a layer, as its attention takes them.
Pair: TypeAlias = tuple[Any, Any]
# Of a probe.
_PROBE_POSITIONS = 64


class AssistantNetwork(StateReader):
    """Attends to the keys and values of the model itself: the last ones of each type of layer.

    Attributes:
        shared: The layers of the model whose keys and values it needs, by the type of its own.
    """

    def __init__(self, head: Network, network: Network) -> None:
        """Create a drafter for a network.

        Raises:
            UnsupportedModelError: It is for another one.
        """
        target = Target(network)
        _require_states(head.config, target)
        owners = _owners(target)
        used = {layer.layer_type: layer for layer in head.model.layers}
        for kind, layer in used.items():
            _require_keys(kind, layer, owners)
        weight = head.model.norm.weight
        super().__init__(head, [target.norm], target.width, weight.dtype)
        self.shared: Mapping[str, int] = {kind: owners[kind].place for kind in used}
        self._keys = {kind: owners[kind].attention for kind in used}
        self._embed, self._scale = target.embed, target.embed_scale
        self.width = target.width
        self.dtype: mx.Dtype = weight.dtype

    def __call__(
        self, tokens: mx.array, states: mx.array, kept: Mapping[str, Pair], places: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return its states [B, 1, D] after tokens, and the logits [B, V].

        Args:
            tokens: [B] ids.
            states: [B, 1, D] those before each token: of the model, or its own.
            kept: By type of layer, the keys and values that the latest fed token of each row sees.
            places: [B] the position of that token.
        """
        head = self._head
        embedded = self._embed(tokens[:, None]) * self._scale
        hidden = head.pre_projection(mx.concatenate([embedded, states], axis=-1))
        for layer in head.model.layers:
            hidden, _, _ = layer(hidden, shared_kv=kept[layer.layer_type], offset=places)
        hidden = head.model.norm(hidden)
        return head.post_projection(hidden), self._logits(hidden)[:, 0]

    def probe(self, width: int) -> mx.array:
        """Return the logits [1, V] of a pass over keys of zeros; it reads nothing."""
        del width
        kept = {kind: _blank(keys, self.dtype) for kind, keys in self._keys.items()}
        states = mx.zeros((1, 1, self.width), self.dtype)
        return self(mx.array([0]), states, kept, mx.array([_PROBE_POSITIONS - 1]))[1]

    def _logits(self, hidden: mx.array) -> mx.array:
        """Return the logits [B, 1, V]; of several clusters of tokens, -inf for the unlikely."""
        head = self._head
        embed = head.model.embed_tokens
        masked = head.masked_embedding
        if masked is None:
            return (
                embed.as_linear(hidden) if head.config.tie_word_embeddings else head.lm_head(hidden)
            )
        scores = masked.centroids(hidden)
        clusters = mx.argpartition(scores, kth=-masked.top_k, axis=-1)[..., -masked.top_k :]
        ordering = masked.token_ordering.reshape(masked.num_centroids, -1)
        ids = ordering[clusters].flatten(2)
        logits = (embed(ids) @ hidden[..., None]).squeeze(-1)
        none = mx.full((*hidden.shape[:2], masked.vocab_size), -mx.inf, logits.dtype)
        return mx.put_along_axis(none, ids, logits, axis=-1)


class _Owner(NamedTuple):
    """A layer of a model with keys and values of its own, and its place."""

    place: int
    attention: Network


def _owners(target: Target) -> Mapping[str, _Owner]:
    """Return the last layer of each type that has its own keys and values.

    Raises:
        UnsupportedModelError: The model is no Gemma 4.
    """
    previous = getattr(target.decoder, "previous_kvs", None)
    if previous is None:
        raise UnsupportedModelError("the assistant is for a Gemma 4, and the model is another one")
    return {
        layer.layer_type: _Owner(place, layer.self_attn)
        for place, layer in enumerate(target.layers)
        if previous[place] == place
    }


def _require_states(config: Any, target: Target) -> None:  # noqa: ANN401 (of upstream)
    """Check the fields of an assistant's config.json that say which states and tokens it knows."""
    if config.backbone_hidden_size != target.width:
        raise UnsupportedModelError(
            f"the assistant is for states of {config.backbone_hidden_size} numbers "
            f"(backbone_hidden_size), and the model has {target.width}"
        )
    if (own := config.text_config.vocab_size) != target.vocab_size:
        raise UnsupportedModelError(
            f"the assistant is for a vocabulary of {own} tokens (text_config.vocab_size), and the "
            f"model has {target.vocab_size}"
        )


def _require_keys(kind: str, layer: Network, owners: Mapping[str, _Owner]) -> None:
    """Check that a layer of an assistant can attend to keys of the model."""
    if kind not in owners:
        raise UnsupportedModelError(
            f"the assistant has layers of the type {kind!r} (text_config.layer_types), and the "
            "model has none with keys"
        )
    own, theirs = layer.self_attn, owners[kind].attention
    if own.head_dim != theirs.head_dim:
        raise UnsupportedModelError(
            f"the assistant is for keys of {own.head_dim} numbers (text_config."
            f"{_HEAD_WIDTHS[kind]}), and the model has {theirs.head_dim}"
        )
    if own.n_heads % theirs.n_kv_heads:
        raise UnsupportedModelError(
            f"the assistant has {own.n_heads} attention heads (text_config.num_attention_heads), "
            f"which cannot share the {theirs.n_kv_heads} key heads of the model"
        )


def _blank(attention: Network, dtype: mx.Dtype) -> Pair:
    shape = (1, attention.n_kv_heads, _PROBE_POSITIONS, attention.head_dim)
    return mx.zeros(shape, dtype), mx.zeros(shape, dtype)


def build_assistant(directory: Path, network: Network, form: HeadWeights) -> AssistantNetwork:
    """Return the assistant of a Gemma 4, with weights still on disk."""
    from mlx_vlm.speculative.drafters.gemma4_assistant import Model, ModelConfig

    config = read_head_config(directory)
    head = Model(ModelConfig.from_dict(config))
    weights = head.sanitize(read_weights(directory, lambda name: name))
    load_weights(head, weights, config.get("quantization"))
    form.settle(head)
    return AssistantNetwork(head, network)


def build_nemotron(directory: Path, network: Network, form: HeadWeights) -> MtpNetwork:
    """Return the MTP head of a Nemotron-H, alone or with its model; weights stay on disk."""
    from mlx_vlm.speculative.drafters import load_drafter

    module, _ = load_drafter(str(directory), "mtp", lazy=True)
    first, last = module.layers[0], module.layers[-1]
    head = nn.Module()
    head.pre_fc_norm_embedding, head.pre_fc_norm_hidden = first.pop("enorm"), first.pop("hnorm")
    head.fc, head.norm = first.pop("eh_proj"), last.pop("final_layernorm")
    head.layers = _by_attention(module.layers)
    form.settle(head)
    return MtpNetwork(head, network)


class _Stage(nn.Module):  # type: ignore[misc]  # (MLX is untyped)
    """Layers of which one has keys: one layer for `MtpNetwork`."""

    def __init__(self, blocks: Sequence[Network]) -> None:
        super().__init__()
        self.blocks = list(blocks)

    def __call__(self, states: mx.array, mask: object, cache: object) -> mx.array:
        for block in self.blocks:
            states = block(states, mask=mask, cache=cache if block.block_type == "*" else None)
        return states


def _by_attention(blocks: Sequence[Network]) -> list[_Stage]:
    """Return blocks in stages that begin with attention, but for the first."""
    starts = [n for n, block in enumerate(blocks) if block.block_type == "*"]
    bounds = [0, *starts[1:], len(blocks)]
    return [_Stage(blocks[start:stop]) for start, stop in pairwise(bounds)]


def build_glm5_next(directory: Path, network: Network, form: HeadWeights) -> MtpNetwork:
    """Return the MTP head of a GLM-5-Next, alone or with its model; weights stay on disk."""
    from mlx_vlm.models.cache import CacheList, KVCache
    from mlx_vlm.speculative.drafters import load_drafter

    module, _ = load_drafter(str(directory), "mtp", lazy=True)
    head, block = nn.Module(), module.pop("mtp_block")
    head.pre_fc_norm_embedding, head.pre_fc_norm_hidden = module.pop("enorm"), module.pop("hnorm")
    head.fc, head.norm = module.pop("eh_proj"), module.pop("shared_head_norm")
    attention = block.self_attn
    attention.__class__ = projecting(type(attention))
    attention.indexer.__class__ = _with_kept_keys(type(attention.indexer))
    head.layers = [_Unmasked(block)]
    form.settle(head)

    def layer_cache() -> CacheList:
        # Of latents, of which of them are no padding, and of the keys and gates of pools.
        return CacheList(KVCache(), KVCache(), KVCache(), Projections())

    return MtpNetwork(head, network, layer_cache=layer_cache)


class _Unmasked(nn.Module):  # type: ignore[misc]  # (MLX is untyped)
    """A layer whose attention hides later tokens by itself."""

    def __init__(self, block: Network) -> None:
        super().__init__()
        self.block = block

    def __call__(self, states: mx.array, mask: object, cache: object) -> mx.array:
        del mask
        output: mx.array = self.block(states, cache=cache)
        return output


def _with_kept_keys(kind: type) -> type:
    """Return a class of indexers that make all pools anew, so that a head can go back.

    Upstream keeps the pools, and only the keys of one that is not full.
    """

    def call(self: Network, x: mx.array, *others: Any) -> mx.array:  # noqa: ANN401 (of upstream)
        q_resid, padding, flags, keys, offset = others
        pools = _Pools(keys, self.index_kpool)
        output: mx.array = kind.__call__(self, x, q_resid, padding, flags, pools, offset)
        return output

    return derived(kind, __call__=call)


class _Pools:
    """Upstream's interface of pools, over a cache of the keys and gates of all positions.

    Attributes:
        offset: The number of pools of a row, or those [B] of the rows of a batch.
    """

    def __init__(self, kept: Any, ratio: int) -> None:  # noqa: ANN401 (of upstream)
        self._kept = kept
        self._ratio = ratio
        self.offset: int | mx.array = 0

    def accumulate_windows(
        self, keys: mx.array, gates: mx.array, _offset: object
    ) -> tuple[mx.array, mx.array, int]:
        """Append [B, T, n] and return those of all positions that fill a pool, and a 0."""
        pair = self._kept.update_and_fetch(keys[:, None], gates[:, None])
        count = pair[0].shape[2]
        whole = count - count % self._ratio
        padding = getattr(self._kept, "left_padding", None)
        if padding is None:
            self.offset = count // self._ratio
            keys, gates = (each[:, 0, :whole] for each in pair)
            return keys, gates, 0
        self.offset = (count - padding) // self._ratio
        places = mx.minimum(padding[:, None] + mx.arange(whole), count - 1)[..., None]
        keys, gates = (mx.take_along_axis(each[:, 0], places, axis=1) for each in pair)
        return keys, gates, 0

    def update_and_fetch(self, pools: mx.array) -> mx.array:
        """Return all pools [B, N, n], which these are."""
        return pools
