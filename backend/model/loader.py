"""A directory to a `RunnableModel`, on the engine thread.

Everything that can fail quickly fails before the weights are read.
"""

import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from backend.config import ModelOptions
from backend.core.model import ModelCard
from backend.errors import LoadError, UnsupportedModelError
from backend.model.adapters import apply_adapters
from backend.model.bare_decoder import HEADLESS_CONFIG, decoder_classes, is_bare_decoder
from backend.model.checkpoint import (
    declared_eos_ids,
    own_context_length,
    read_config,
    read_generation_config,
    require_weights,
)
from backend.model.encoder import is_encoder, load_encoder
from backend.model.failures import UPSTREAM_FAILURES, as_load_error
from backend.model.hf_tokenizer import load_tokenizer
from backend.model.loaded import RunnableModel
from backend.model.media_processor import MediaProcessor
from backend.model.media_support import find_media_support
from backend.model.retrieval import embedding_profile, reranker_kind
from backend.model.template import ChatTemplate
from backend.model.tokenizer import Tokenizer
from backend.model.towers import has_towers, load_processor, load_with_towers
from backend.model.upstream import Network, import_mlx_lm
from backend.model.vision_network import VisionNetwork
from backend.model.weights import cast, evaluate, memory_bytes, require_memory, weights_bytes

log = logging.getLogger(__name__)


Divide: TypeAlias = Callable[[Network], None]
"""Takes away what other processes compute of a network whose weights are not in memory yet."""


def load(
    options: ModelOptions,
    directory: Path,
    *,
    cancelled: Callable[[], bool],
    divide: Divide | None = None,
) -> RunnableModel:
    """Load a model; on any failure nothing of it stays in memory.

    Args:
        options: What the LoadModel asked for.
        directory: Where the model lies.
        cancelled: Asked between pieces of work; true ends the load.
        divide: Leaves of the network what this process computes; `None` leaves all.

    Raises:
        LoadError: Says in a user's words what is wrong.
    """
    started_at = time.monotonic()
    with _failures_told(directory):
        config = read_config(directory)
        require_weights(directory)
        if is_encoder(config):
            model = load_encoder(options, directory, config, cancelled)
        else:
            model = _lazy_model(options, directory, config, divide)
            require_memory(model.card.weights_bytes, memory_bytes())
            evaluate(model.network, cancelled)
    log.info(
        "loaded %s: %s, %.2f GB in %.1f s",
        model.card.name,
        model.card.model_type,
        model.card.weights_bytes / 1e9,
        time.monotonic() - started_at,
    )
    return model


def look(options: ModelOptions, directory: Path) -> RunnableModel:
    """Return a decoder whose weights are not in memory: all else that can fail has not.

    Raises:
        LoadError: Says in a user's words what is wrong.
    """
    with _failures_told(directory):
        config = read_config(directory)
        require_weights(directory)
        if is_encoder(config):
            raise UnsupportedModelError(
                f"{config['model_type']} is an encoder: it cannot be divided"
            )
        return _lazy_model(options, directory, config, None)


@contextmanager
def _failures_told(directory: Path) -> Iterator[None]:
    """Say in a user's words what fails, and keep nothing of it in memory."""
    try:
        yield
    except LoadError as error:
        _forget(error)
        raise
    except UPSTREAM_FAILURES as failure:
        _forget(failure)
        raise as_load_error(failure, directory) from failure


def _lazy_model(
    options: ModelOptions, directory: Path, config: Mapping[str, Any], divide: Divide | None
) -> RunnableModel:
    """Build a decoder; no weight is in memory yet."""
    network = _lazy_network(options, directory, config)
    if divide is not None:
        divide(network)
    tokenizer, template, eos_ids = load_tokenizer(options, directory, _defaults(network))
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
        # Some checkpoints say -1 for none.
        eos_token_ids=eos_ids.intersection(range(width)),
        weights_bytes=weights_bytes(network),
        supports_tools=template.supports_tools,
        supports_thinking=template.supports_thinking,
        grammar_triggers=options.grammar_triggers,
        embedding=embedding_profile(directory, own_name, config),
        reranker=reranker_kind(own_name, config),
    )
    media = _media_processor(options, directory, tokenizer, template, network)
    return RunnableModel(tokenizer, template, card, network, media=media)


def _lazy_network(options: ModelOptions, directory: Path, config: Mapping[str, Any]) -> Network:
    """Build the network with its adapters and data type; no weight is in memory yet."""
    if has_towers(options, directory, config):
        network = load_with_towers(options, directory, config)
        _mend(network, options)
        return VisionNetwork(network)
    special: dict[str, Any] = {}
    if is_bare_decoder(directory):
        log.warning("%s has no head: it can embed, what it generates means nothing", directory)
        special = {"get_model_classes": decoder_classes, "model_config": dict(HEADLESS_CONFIG)}
    network, _ = import_mlx_lm().load_model(
        directory, lazy=True, trust_remote_code=options.trusts_remote_code, **special
    )
    _mend(network, options)
    return network


def _mend(network: Network, options: ModelOptions) -> None:
    apply_adapters(network, options.adapters, options.models_dir)
    if options.dtype is not None:
        cast(network, options.dtype)


def _media_processor(
    options: ModelOptions,
    directory: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    network: Network,
) -> MediaProcessor | None:
    if not isinstance(network, VisionNetwork):
        return None
    processor = load_processor(options, directory)
    return find_media_support(processor, tokenizer, template, network)


def _defaults(network: Network) -> Mapping[str, Any]:
    """Return what the model's module says of a tokenizer that says nothing itself."""
    # Code of the model's own is no registered module.
    module = sys.modules.get(type(network).__module__)
    defaults: Mapping[str, Any] = getattr(module, "TOKENIZER_DEFAULTS", {})
    return defaults


def _context_length(options: ModelOptions, config: Mapping[str, Any]) -> int | None:
    own = own_context_length(config)
    wanted = options.max_model_len
    if wanted is not None and own is not None and wanted > own:
        log.warning("MaxModelLen %d is more than the %d that the model was made for", wanted, own)
    return own if wanted is None else wanted


def _logits_width(network: Network) -> int:
    """Return the width of the logits, told by a lazy step: nothing is computed.

    A model whose code cannot run on this machine fails here, before its weights are read.
    """
    from mlx_lm.models.cache import make_prompt_cache

    logits = network(mx.array([[0]]), cache=make_prompt_cache(network))
    return int(logits.shape[-1])


def _forget(failure: BaseException) -> None:
    """Free what the frames of a failed load still hold: the error may live long in a log."""
    traceback.clear_frames(failure.__traceback__)
    gc.collect()
    mx.clear_cache()
