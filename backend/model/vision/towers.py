"""Loads checkpoints with towers for pictures or sounds, through mlx-vlm."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import getclosurevars
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from backend.config import ModelOptions
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config import WEIGHTS_PATTERN, read_config
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, one_line
from backend.model.checkpoint.upstream import Network, import_mlx_lm
from backend.model.text.tokenizer_file import follow_held
from backend.model.vision.processor_call import HfProcessor
from backend.model.vision.processor_mends import mend_processor
from common.remedies import vision_command

# Upstream's own arguments.
Untyped: TypeAlias = Any

# What some of mlx-vlm's processors need besides a checkpoint's usual files, by class.
_NEEDED = {
    "Ernie4_5_VLProcessor": "tokenizer.model, a file of the original checkpoint",
    "Phi4SigLipProcessor": "the packages torch and torchvision",
}
_TOWER_CONFIGS = ("vision_config", "audio_config")
_TOWER_NAMES = ("vision", "visual", "vit", "image", "audio")


def has_towers(options: ModelOptions, directory: Path, config: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint has towers that the options want.

    Text-only conversions keep the configuration of towers whose weights they omit.
    """
    if not options.tuning.checkpoint.vision or not _names_towers(config):
        return False
    names = {name for path in directory.glob(WEIGHTS_PATTERN) for name in mx.load(str(path))}
    return any(part in name for name in names for part in _TOWER_NAMES)


def _names_towers(config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration, or one nested in it, describes a tower."""
    parts = (part for part in config.values() if isinstance(part, Mapping))
    return any(level.get(name) for level in (config, *parts) for name in _TOWER_CONFIGS)


def load_from_mlx_vlm(options: ModelOptions, directory: Path, config: Mapping[str, Any]) -> Network:
    """Build an mlx-vlm model without reading weights into memory.

    Raises:
        LoadError: mlx-vlm is not installed, or the checkpoint has code that may not run.
        UnsupportedModelError: The model does not generate text.
    """
    # mlx-lm first, through `import_mlx_lm`: mlx-vlm may import it.
    import_mlx_lm()
    if importlib.util.find_spec("mlx_vlm") is None:
        raise LoadError(
            f"{directory} has towers for pictures or sounds, which need mlx-vlm: "
            f"{vision_command()}, or load its text part with the option vision:false"
        )
    if "model_file" in config and not options.trusts_remote_code:
        raise LoadError(f"{directory} has its own code: set trust_remote_code to run it")
    from mlx_vlm.utils import load_model

    model = load_model(directory, lazy=True)
    if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(
            f"{directory} is of the model type {config['model_type']!r}, which cannot generate text"
        )
    return model


def load_processor(options: ModelOptions, directory: Path) -> HfProcessor:
    """Return the media processor of a loaded model, as made by transformers or mlx-vlm.

    Raises:
        Exception: It cannot be loaded; one of `UPSTREAM_FAILURES`.
    """
    from mlx_vlm.utils import load_image_processor
    from mlx_vlm.utils import load_processor as load_upstream

    trust = {"trust_remote_code": options.trusts_remote_code}
    own_class = _processor_class(read_config(directory)["model_type"])
    with _without_recursion(own_class):
        processor = load_upstream(directory, add_detokenizer=False, **trust)
        if own_class is not None and is_tokenizer(processor):
            processor = _own_processor(own_class, directory, trust)
    # Some models have their own class for pictures.
    if own := load_image_processor(directory, **trust):
        processor.image_processor = own
    mend_processor(processor)
    follow_held(processor, directory)
    return processor


def _own_processor(own_class: Untyped, directory: Path, trust: Mapping[str, bool]) -> HfProcessor:
    """Load a processor of mlx-vlm's own, which has hidden why it cannot be loaded."""
    try:
        return own_class.from_pretrained(directory, **trust)
    except UPSTREAM_FAILURES as error:
        needed = _NEEDED.get(own_class.__name__)
        if needed is None:
            raise
        raise OSError(f"it needs {needed}: {one_line(error)}") from error


@contextmanager
def _without_recursion(own_class: Untyped | None) -> Iterator[None]:
    """Let a processor class fail that loads itself: mlx-vlm has one that does, without torch."""
    if own_class is None:
        yield
        return
    load, is_loading = own_class.from_pretrained, False

    def load_once(*args: Untyped, **kwargs: Untyped) -> HfProcessor:
        nonlocal is_loading
        if is_loading:
            raise OSError("mlx-vlm's processor loads itself")
        is_loading = True
        try:
            return load(*args, **kwargs)
        finally:
            is_loading = False

    own_class.from_pretrained = load_once
    try:
        yield
    finally:
        own_class.from_pretrained = load


def is_tokenizer(processor: HfProcessor) -> bool:
    """Tell whether a processor is only a tokenizer, which takes no media."""
    from transformers import PreTrainedTokenizerBase

    return isinstance(processor, PreTrainedTokenizerBase)


def _processor_class(model_type: str) -> Untyped | None:
    """Return the processor class that mlx-vlm has for a loaded family, if any.

    Each family's module wraps the loader of transformers in a function that holds its class.
    """
    from transformers import AutoProcessor

    load = AutoProcessor.from_pretrained
    while "processor_cls" in (held := getclosurevars(load.__func__).nonlocals):
        if model_type.lower() in held["target_model_types"]:
            return held["processor_cls"]
        load = held["previous_from_pretrained"]
    return None
