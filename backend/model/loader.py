"""Loads a `RunnableModel` from a directory, in the engine process.

Quick checks run before the weights are read.
"""

import gc
import hashlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx

from backend.config import ModelOptions
from backend.core.model import ModelCard
from backend.core.prompt import MediaKind
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.adapters import apply_adapters
from backend.model.checkpoint.config_file import (
    asks_for_several,
    attention_spans,
    decision_profile,
    declared_eos_ids,
    embedding_profile,
    own_context_length,
    read_config,
    read_generation_config,
    require_weights,
    reranker_kind,
)
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, as_load_error, one_line
from backend.model.checkpoint.gate import require_sound
from backend.model.checkpoint.mends import mend
from backend.model.checkpoint.upstream import (
    Network,
    import_mlx_lm,
    is_installed,
    is_known_to_mlx_lm,
    is_known_to_mlx_vlm,
    unknown_type,
)
from backend.model.checkpoint.weights import (
    HEADLESS_CONFIG,
    MakeRoom,
    cast_weights,
    decoder_classes,
    evaluate,
    is_bare_decoder,
    memory_bytes,
    need_no_room,
    require_fractions,
    require_memory,
    rules_out_float32,
    weights_bytes,
)
from backend.model.device import DEVICE
from backend.model.encoder import is_encoder, lazy_encoder
from backend.model.loaded import RunnableModel
from backend.model.text.hf_tokenizer import load_bare_tokenizer, load_tokenizer
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.media_support import MediaSupport, find_media_support
from backend.model.vision.towers import (
    has_towers,
    load_from_mlx_vlm,
    load_processor,
    require_own_tokenizer,
)
from backend.model.vision.vision_network import NotEmbeddableError, VisionNetwork
from common.directories import state_directory
from common.machine_memory import in_words

if TYPE_CHECKING:
    from backend.model.experts import Experts

_NAME_BYTES = 8

log = logging.getLogger(__name__)


Divide: TypeAlias = Callable[[Network], None]
"""Removes the parts of a lazy network that other processes compute."""


def load(
    options: ModelOptions,
    directory: Path,
    *,
    divide: Divide | None = None,
    renders: bool = True,
    make_room: MakeRoom = need_no_room,
    beside_bytes: int = 0,
) -> RunnableModel:
    """Load a model; a failed load leaves nothing in memory.

    Args:
        divide: Reduces the network to the part that this process computes; `None` keeps all.
        renders: Whether this process needs the chat template, and its abilities in the card; a
            model that takes media always has it.
        make_room: Called with the size of these weights plus `beside_bytes` before they are read.
        beside_bytes: Size of another model's weights that are already in memory.
    """
    model = look(options, directory, divide=divide, renders=renders)
    prepare(model, options, beside_bytes=beside_bytes)
    return read(model, make_room=make_room, beside_bytes=beside_bytes)


def look(
    options: ModelOptions,
    directory: Path,
    *,
    divide: Divide | None = None,
    renders: bool = True,
) -> RunnableModel:
    """Return a model without reading its weights; the arguments are those of `load`."""
    with _as_load_errors(directory):
        require_sound(directory)
        config = read_config(directory)
        require_weights(directory)
        if is_encoder(config):
            return lazy_encoder(options, directory, config, renders=renders)
        return _lazy_model(options, directory, config, divide, renders=renders)


def prepare(model: RunnableModel, options: ModelOptions, *, beside_bytes: int = 0) -> None:
    """Check that the weights of a model fit into memory; open the store of experts on disk."""
    directory = Path(model.card.path)
    with _as_load_errors(directory):
        if model.experts is not None:
            model.experts.open(options, directory, [directory, _own_folder(options, directory)])
        require_memory(model.card.weights_bytes, memory_bytes() - beside_bytes)


def read(
    model: RunnableModel, *, make_room: MakeRoom = need_no_room, beside_bytes: int = 0
) -> RunnableModel:
    """Return a prepared model after reading its weights; the arguments are those of `load`."""
    started_at = time.monotonic()
    with _as_load_errors(Path(model.card.path)):
        make_room(model.card.weights_bytes + beside_bytes)
        evaluate(model.network)
    log.info(
        "loaded %s: %s, %s of weights in %.1f s",
        model.card.name,
        model.card.model_type,
        in_words(model.card.weights_bytes),
        time.monotonic() - started_at,
    )
    return model


@contextmanager
def _as_load_errors(directory: Path) -> Iterator[None]:
    """Convert failures to errors for users, and free the memory of the failed load."""
    try:
        yield
    except LoadError as error:
        _forget(error)
        raise
    except UPSTREAM_FAILURES as failure:
        _forget(failure)
        raise as_load_error(failure, directory) from failure


def _lazy_model(
    options: ModelOptions,
    directory: Path,
    config: Mapping[str, Any],
    divide: Divide | None,
    *,
    renders: bool = True,
) -> RunnableModel:
    """Build a decoder without reading weights into memory."""
    network, experts = _lazy_network(options, directory, config)
    if divide is not None:
        divide(network)
    is_rendered = renders or isinstance(network, VisionNetwork)
    read = load_tokenizer if is_rendered else load_bare_tokenizer
    tokenizer, template, eos_ids = read(options, directory, tokenizer_defaults(network))
    # The host may call a model anything: its directory has a name too.
    own_name = f"{Path(options.model).name} {directory.name}"
    width = _logits_width(network)
    eos_ids |= declared_eos_ids(config, read_generation_config(directory))
    card = ModelCard(
        name=options.model or directory.name,
        path=str(directory),
        model_type=config["model_type"],
        context_length=_context_length(options, config),
        vocab_size=width,
        # Some checkpoints have -1 for none.
        eos_token_ids=eos_ids.intersection(range(width)),
        weights_bytes=weights_bytes(network) + (experts.budget_bytes if experts else 0),
        attention_spans=attention_spans(config),
        supports_tools=template.supports_tools,
        supports_thinking=template.supports_thinking,
        grammar_triggers=options.grammar_triggers,
        embedding=embedding_profile(directory, own_name, config),
        reranker=reranker_kind(own_name, config),
        decisions=decision_profile(config),
    )
    if not isinstance(network, VisionNetwork):
        return RunnableModel(tokenizer, template, card, network, experts=experts)
    require_own_tokenizer(options, directory, config["model_type"], tokenizer)
    media = _media_support(options, directory, tokenizer, template, network)
    card = replace(card, refused_media=media.refused)
    return RunnableModel(tokenizer, template, card, network, media=media.processor, experts=experts)


def _lazy_network(
    options: ModelOptions, directory: Path, config: Mapping[str, Any]
) -> tuple[Network, "Experts | None"]:
    """Build the network with its adapters and data type, without reading weights into memory.

    Returns:
        The network, and its experts if they stay on disk.
    """
    if not _takes_mlx_vlm(options, directory, config):
        decoder = _lazy_decoder(options, directory)
        require_fractions(decoder, directory)
        return decoder, _adjust(decoder, options)
    model = load_from_mlx_vlm(options, directory, config)
    require_fractions(model, directory)
    experts = _adjust(model, options)
    network = VisionNetwork(model)
    _require_decoder_only(network, directory, config)
    return network, experts


def _lazy_decoder(options: ModelOptions, directory: Path) -> Network:
    special: dict[str, Any] = {}
    if is_bare_decoder(directory):
        log.warning("%s has no head: it can embed, but not generate text", directory)
        special = {"get_model_classes": decoder_classes, "model_config": dict(HEADLESS_CONFIG)}
    network, _ = import_mlx_lm().load_model(
        directory, lazy=True, trust_remote_code=options.trusts_remote_code, **special
    )
    return network


def _takes_mlx_vlm(options: ModelOptions, directory: Path, config: Mapping[str, Any]) -> bool:
    """Tell whether mlx-vlm must build a model: for its towers, or for lack of code in mlx-lm."""
    text, sees = is_known_to_mlx_lm(config), has_towers(options, directory, config)
    if text and not sees:
        # Without importing mlx-vlm, which takes as long as reading a small model.
        return False
    towers = is_known_to_mlx_vlm(config)
    if not text and not towers:
        raise UnsupportedModelError(f"{directory} {unknown_type(config['model_type'])}")
    if not sees:
        return True
    if not towers and is_installed("mlx_vlm"):
        log.warning("mlx-vlm does not know %s: text only", config["model_type"])
        return False
    return True


def _require_decoder_only(
    network: VisionNetwork, directory: Path, config: Mapping[str, Any]
) -> None:
    try:
        network.require_decoder_only()
    except NotEmbeddableError as error:
        raise UnsupportedModelError(
            f"{directory} is of the model type {config['model_type']!r}, which this backend "
            f"cannot serve: even prompts without media do not come in the place of tokens: {error}"
        ) from error


def _adjust(network: Network, options: ModelOptions) -> "Experts | None":
    """Prepare a network for this device; returns its experts if they stay on disk."""
    mend(network)
    apply_adapters(network, options.adapters, options.models_dir)
    if options.dtype is not None:
        cast_weights(network, options.dtype)
    experts = _take_out(network) if options.tuning.checkpoint.keeps_experts_on_disk else None
    # Ranks on other machines may compute otherwise, and their results are added.
    keeps_type = rules_out_float32(options.dtype) or asks_for_several(options)
    DEVICE.prepare(network, keeps_type=keeps_type, dequantises=options.tuning.checkpoint.dequantize)
    if experts is not None:
        experts.foresee(options, network)
    return experts


def _take_out(network: Network) -> "Experts":
    # Not for every load: a module more.
    from backend.model.experts import Experts

    experts = Experts()
    experts.take_out(network)
    return experts


def _own_folder(options: ModelOptions, directory: Path) -> Path:
    """Return this user's folder for the experts of a checkpoint that nobody may change."""
    name = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=_NAME_BYTES).hexdigest()
    return (options.state_dir or state_directory({})) / "experts" / name


def _media_support(
    options: ModelOptions,
    directory: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    network: VisionNetwork,
) -> MediaSupport:
    if not options.tuning.checkpoint.vision:
        return MediaSupport(None, {})
    try:
        processor = load_processor(options, directory)
    except UPSTREAM_FAILURES as error:
        reason = f"its processor cannot be loaded: {one_line(error)}"
        log.warning("text only: %s", reason)
        return MediaSupport(None, dict.fromkeys(MediaKind, reason))
    return find_media_support(processor, tokenizer, template, network)


def tokenizer_defaults(network: Network) -> Mapping[str, Any]:
    """Return the tokenizer defaults of the model's module."""
    # A checkpoint's own code is not a registered module.
    module = sys.modules.get(type(network).__module__)
    defaults: Mapping[str, Any] = getattr(module, "TOKENIZER_DEFAULTS", {})
    return defaults


def _context_length(options: ModelOptions, config: Mapping[str, Any]) -> int | None:
    own = own_context_length(config)
    wanted = options.max_model_len
    if wanted is not None and own is not None and wanted > own:
        log.warning(
            "MaxModelLen %d exceeds the %d tokens that the model was trained for", wanted, own
        )
    return own if wanted is None else wanted


def _logits_width(network: Network) -> int:
    """Return the width of the logits from a lazy step that computes nothing.

    A model whose code cannot run on this machine fails here, before its weights are read.
    """
    from mlx_lm.models.cache import make_prompt_cache

    logits = network(mx.array([[0]]), cache=make_prompt_cache(network))
    return int(logits.shape[-1])


def _forget(failure: BaseException) -> None:
    """Free the objects in the frames of a failed load: a log may keep the error for long."""
    traceback.clear_frames(failure.__traceback__)
    gc.collect()
    mx.clear_cache()
