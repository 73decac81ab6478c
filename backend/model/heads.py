"""Heads: small networks that draft from the hidden states of a large one, and the kinds of them."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache
from mlx_lm.models.rope_utils import initialize_rope

from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_file import (
    CONFIG_NAME,
    WEIGHTS_PATTERN,
    read_json,
    require_sensible,
    require_weights,
    text_config,
)
from backend.model.checkpoint.extras import (
    GLM5_NEXT,
    NEMOTRON,
    NEXTN,
    QWEN,
    MtpLayout,
    mtp_layout,
)
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, as_load_error
from backend.model.checkpoint.upstream import Network, derived, is_installed
from backend.model.checkpoint.weights import cast_weights, rules_out_float32
from backend.model.device import DEVICE, Device

# Arrays in nested dicts and lists, as MLX keeps them.
Arrays: TypeAlias = Any


class Target:
    """The parts of a model that a head uses.

    Attributes:
        decoder: The module that has them.
        embed: Maps ids [B, T] to embeddings [B, T, D], which the model multiplies by `embed_scale`.
        layers: In order.
        norm: The last norm.
        project: Maps normed states to logits.
    """

    def __init__(self, network: Network) -> None:
        language_model = getattr(network, "language_model", network)
        decoder, embeddings, norm = _parts(language_model)
        self.decoder = decoder
        self.embed = getattr(decoder, embeddings)
        self.layers: Sequence[Network] = decoder.layers
        self.norm = getattr(decoder, norm)
        self.embed_scale: float = getattr(decoder, "embed_scale", 1.0)
        self.project = getattr(language_model, "lm_head", None) or self.embed.as_linear
        self.width: int = self.norm.weight.shape[0]
        self.vocab_size: int = self.embed.weight.shape[0]


# The names of the decoder in a language model, of its embeddings, and of its last norm.
_PARTS = (("model", "embed_tokens", "norm"), ("backbone", "embeddings", "norm_f"))


def _parts(language_model: Network) -> tuple[Network, str, str]:
    """Return the decoder, and the names of its embeddings and norm."""
    for name, embeddings, norm in _PARTS:
        decoder: Network = getattr(language_model, name, None)
        if all(hasattr(decoder, part) for part in (embeddings, "layers", norm)):
            return decoder, embeddings, norm
    raise UnsupportedModelError(
        "the model has no embeddings, layers and norm where heads expect them"
    )


class StateReader:
    """A network that drafts from the hidden states of a large one.

    Attributes:
        tapped: Modules of the large one, whose outputs it reads, side by side.
        token_bytes: Size of the states of a token, which are kept until they have been read.
        kept_bytes: Size of all that it keeps of a token that it has read.
    """

    kept_bytes = 0

    def __init__(
        self, head: Network, tapped: Sequence[Network], width: int, dtype: mx.Dtype
    ) -> None:
        """Wrap a module of upstream; `width` is of the states of all tapped modules."""
        self.tapped = tapped
        self.token_bytes = width * dtype.size
        self._head = head

    def parameters(self) -> Arrays:
        """Return the head's own weights as a tree."""
        return self._head.parameters()

    @property
    def state(self) -> Arrays:
        """All arrays of the head."""
        return self._head.state

    def probe(self, width: int) -> mx.array:
        """Return the outputs of a pass that reads `width` tokens of a row; for a measurement."""
        raise NotImplementedError


class HeadNetwork(StateReader, ABC):
    """A head as a network of the engine: ids [B, T] and the caches -> logits [B, T, V]."""

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
            masks_are_arrays: Whether its attention needs masks as arrays, as MLA does.
            layer_cache: Creates the empty cache of one of its layers.
        """
        self._width = target.width * len(tapped)
        super().__init__(head, tapped, self._width, head.norm.weight.dtype)
        self._before: mx.array | None = None
        self._after: list[mx.array] = []
        self._embed = head.get("embed_tokens") or target.embed
        self._masks_are_arrays = masks_are_arrays
        self._layer_cache = layer_cache

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

    return derived(kind, __call__=call)


def read_head_config(directory: Path) -> dict[str, Any]:
    """Return the content of the config.json of a head, which need not name a model type."""
    path = directory / CONFIG_NAME
    config = read_json(path, dict)
    require_sensible(path, config)
    return config


def read_weights(directory: Path, rename: Callable[[str], str | None]) -> dict[str, mx.array]:
    """Return the weights of a directory, lazily.

    Args:
        rename: Returns a weight's name in the head's network; `None` for other weights.
    """
    found: dict[str, mx.array] = {}
    for path in sorted(directory.glob(WEIGHTS_PATTERN)):
        for name, weight in mx.load(str(path)).items():
            if (own := rename(name)) is not None:
                found[own] = weight
    return found


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The form of a head's weights, which is that of its model's.

    Attributes:
        dtype: Their type; `None` is their own, or the one that suits this device.
        dequantises: Whether quantised ones may be dequantised.
    """

    dtype: str | None = None
    dequantises: bool = True

    def settle(self, head: Network, device: Device = DEVICE) -> None:
        """Prepare weights that may still be lazy, before anything depends on their type."""
        if self.dtype is not None:
            cast_weights(head, self.dtype)
        keeps_type = rules_out_float32(self.dtype)
        device.prepare(head, keeps_type=keeps_type, dequantises=self.dequantises)


def load_weights(
    head: Network, weights: Mapping[str, mx.array], quantization: Mapping[str, Any] | None
) -> None:
    """Set the weights of a head, lazily.

    Args:
        weights: All its weights.
        quantization: The quantisation given by config.json, if any.

    Raises:
        ValueError: The weights do not match the head.
    """
    names = ("group_size", "bits", "mode")
    if chosen := {name: value for name, value in (quantization or {}).items() if name in names}:
        nn.quantize(head, **chosen, class_predicate=lambda path, _: f"{path}.scales" in weights)
    head.load_weights(list(weights.items()))


class MtpNetwork(HeadNetwork):
    """Reads the last states of the model; uses its output projection or its own."""

    def __init__(self, head: Network, network: Network, **attention: Any) -> None:  # noqa: ANN401
        """Create a drafter for a network.

        Args:
            attention: `masks_are_arrays` and `layer_cache` of a `HeadNetwork`.
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


def build_mtp(directory: Path, network: Network, form: HeadWeights) -> MtpNetwork:
    """Return the MTP head of a directory, alone or with its model; weights stay on disk."""
    from mlx_vlm.speculative.drafters import load_drafter

    head, _ = load_drafter(str(directory), "mtp", lazy=True)
    form.settle(head)
    return MtpNetwork(head, network)


# Model types of checkpoints split off by mlx-vlm, and the prefix of names there.
SPLIT_TYPES = {"glm4_moe_lite_mtp": "model.", "glm_moe_dsa_mtp": "mtp."}
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


def build_nextn(directory: Path, network: Network, form: HeadWeights) -> MtpNetwork:
    """Return the head of a directory, alone or with its model; weights stay on disk."""
    config = read_head_config(directory)
    text = text_config(config)
    split_prefix = SPLIT_TYPES.get(str(config.get("model_type")))
    is_split = split_prefix is not None
    prefix = split_prefix or f"model.layers.{text['num_hidden_layers']}."
    head = _built(text, config, read_weights(directory, _rename_from(prefix, is_split=is_split)))
    form.settle(head)
    has_index = "indexer" in head.layers[0].self_attn
    layer_cache = (lambda: CacheList(KVCache(), KVCache())) if has_index else KVCache
    return MtpNetwork(head, network, masks_are_arrays=True, layer_cache=layer_cache)


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
    """Return the fields of mlx-vlm's `Eagle3Config`."""
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


def build_eagle(directory: Path, network: Network, form: HeadWeights) -> EagleNetwork:
    """Return the EAGLE-3 head of a directory, with weights still on disk."""
    config = read_head_config(directory)
    head = _built_eagle(config, Target(network), read_weights(directory, _renamed_eagle))
    form.settle(head)
    return EagleNetwork(head, network)


def _built_eagle(
    config: Mapping[str, Any], target: Target, weights: dict[str, mx.array]
) -> Network:
    from mlx_vlm.speculative.drafters.eagle3 import Model, ModelConfig

    head = Model(ModelConfig.from_dict(head_config(config, len(target.layers))))
    _leave_to_the_model(head, target, weights)
    _scale_positions(head, layer_config(config))
    load_weights(head, head.sanitize(weights), config.get("quantization"))
    return head


def _renamed_eagle(name: str) -> str:
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


_MARKS = {"DFlash2DraftModel": "dflash2", "Gemma4DSparkModel": "gemma4_dspark"}


def block_type(config: Mapping[str, Any]) -> str | None:
    """Return the name of mlx-vlm's module for a drafter of blocks, by its config.json."""
    found = (_MARKS.get(name) for name in config.get("architectures") or ())
    if marked := next(filter(None, found), None):
        return marked
    kind, extras = str(config.get("model_type")).lower(), config.get("dflash_config")
    if kind in _MUSE:
        return kind
    if not isinstance(extras, Mapping):
        return None
    ranks = config.get("markov_rank") or extras.get("markov_rank")
    return "dspark" if ranks or extras.get("projector_type") == "dspark" else f"{kind}_dflash"


def _is_block(types: Collection[str]) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: block_type(config) in types


def _is_of(types: Collection[str]) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: config.get("model_type") in types


Build: TypeAlias = Callable[[Path, Network, HeadWeights], StateReader]


def _build_of(module: str, name: str) -> Build:
    """Return a function of a module that is imported when it is called."""

    def build(directory: Path, network: Network, form: HeadWeights) -> StateReader:
        made: Build = getattr(importlib.import_module(f"backend.model.{module}"), name)
        return made(directory, network, form)

    return build


_NO_WAY_BACK = "the caches of its model keep what a rejected draft has written in a batch"
_IN_PIECES = "its model is refused: it answers otherwise where a prompt is fed in pieces"
# Why drafters of mlx-vlm cannot be used, by their modules.
_REFUSED = {
    "qwen4_exp_mtp": _NO_WAY_BACK,
    "deepseek_v4_mtp": _IN_PIECES,
    "deepseek_v4_dspark": _IN_PIECES,
    "hy_v4_mtp": "its model is refused: it does not answer here as in mlx-vlm",
    "inkling_mtp": "its model runs only with mlx-audio, which is not installed with this backend",
}
_DFLASH = ("qwen3_dflash", "gemma4_dflash", "laguna_dflash")


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Return the reason why a drafter that is known to mlx-vlm cannot be used, if it is one."""
    kind = block_type(config) or str(config.get("model_type"))
    if kind.endswith("_dflash") and kind not in _DFLASH:
        return _REFUSED.get(kind, "no drafter of this kind is known")
    return _REFUSED.get(kind)


def _refuse(directory: Path, _network: Network, _form: HeadWeights) -> StateReader:
    config = read_head_config(directory)
    kind = block_type(config) or config.get("model_type")
    raise UnsupportedModelError(f"{directory} ({kind}) cannot draft: {_refusal(config)}")


_BUILD_BLOCK = _build_of("blocks", "build_block")


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads.

    Attributes:
        name: Shown to users.
        is_alone: Tells from a config.json whether a checkpoint contains only such a head.
        build: Creates the network from a directory, the model, and the form of its weights.
        layout: Where models' own checkpoints contain such a head, if they do.
    """

    name: str
    is_alone: Callable[[Mapping[str, Any]], bool]
    build: Build
    layout: MtpLayout | None = None


_ASSISTANTS = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})
_MUSE = ("muse_glimmer_assistant",)
_NEMOTRON = _build_of("drafters", "build_nemotron")
_GLM5_NEXT = _build_of("drafters", "build_glm5_next")
_ASSISTANT = _build_of("drafters", "build_assistant")

KINDS = (
    HeadKind("MTP head", _is_of({"qwen3_5_mtp"}), build_mtp, QWEN),
    HeadKind("MTP head", _is_of(SPLIT_TYPES), build_nextn, NEXTN),
    HeadKind("MTP head", _is_of({"nemotron_h_mtp"}), _NEMOTRON, NEMOTRON),
    HeadKind("MTP head", _is_of({"glm5_next_mtp"}), _GLM5_NEXT, GLM5_NEXT),
    HeadKind("EAGLE-3 head", is_eagle3, build_eagle),
    HeadKind("assistant", _is_of(_ASSISTANTS), _ASSISTANT),
    HeadKind("DFlash drafter", _is_block(_DFLASH), _BUILD_BLOCK),
    HeadKind("DFlash 2 drafter", _is_block({"dflash2"}), _BUILD_BLOCK),
    HeadKind("DSpark drafter", _is_block({"dspark", "gemma4_dspark"}), _BUILD_BLOCK),
    HeadKind("Muse assistant", _is_block(_MUSE), _BUILD_BLOCK),
    HeadKind("unusable drafter", lambda config: _refusal(config) is not None, _refuse),
)


def head_alone(directory: Path) -> HeadKind | None:
    """Return the kind of the head that is all that a directory holds, if it is one."""
    path = directory / CONFIG_NAME
    config = read_json(path, dict) if path.is_file() else {}
    return next((kind for kind in KINDS if kind.is_alone(config)), None)


def head_beside(directory: Path) -> HeadKind | None:
    """Return the kind of the head in a model's checkpoint, if it is usable.

    Reads only the names of weights.
    """
    layout = mtp_layout(directory)
    if layout is None or not is_installed("mlx_vlm"):
        return None
    return next(kind for kind in KINDS if kind.layout is layout)


def build_head(
    kind: HeadKind, directory: Path, network: Network, form: HeadWeights | None = None
) -> StateReader:
    """Return the head of a directory, with weights still on disk."""
    require_weights(directory)
    try:
        return kind.build(directory, network, form or HeadWeights())
    except UPSTREAM_FAILURES as failure:
        raise as_load_error(failure, directory) from failure
