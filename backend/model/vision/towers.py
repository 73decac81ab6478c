"""Loads checkpoints with towers for pictures or sounds, through mlx-vlm."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from backend.config import ModelOptions
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config import WEIGHTS_PATTERN
from backend.model.checkpoint.upstream import Network, import_mlx_lm
from backend.model.vision.processor_call import HfProcessor

INSTALL_HINT = "pip install 'mlx-grpc-backend[vision]'"

# Upstream's own arguments.
Untyped: TypeAlias = Any

_TEXT_OPTIONS = ("padding", "padding_side", "add_special_tokens")
_CROPS, _BATCHED = "images_spatial_crop", 3
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
            f"{directory} has towers for pictures or sounds, which need mlx-vlm: {INSTALL_HINT}, "
            "or load its text part with the option vision:false"
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
    """Return the model's media processor, as made by transformers or mlx-vlm."""
    from mlx_vlm.utils import load_image_processor
    from mlx_vlm.utils import load_processor as load_upstream

    trust = {"trust_remote_code": options.trusts_remote_code}
    processor = load_upstream(directory, add_detokenizer=False, **trust)
    # Some models have their own class for pictures.
    if own := load_image_processor(directory, **trust):
        processor.image_processor = own
    elif type(processor).__module__.startswith("mlx_vlm."):
        drop_text_options(getattr(processor, "image_processor", None))
    end_crops(processor)
    return processor


class _TextOptionsDropped:
    """Mixed into an image processor class of transformers to drop tokenizer options."""

    def __call__(self, *arguments: Untyped, **options: Untyped) -> Untyped:
        fitting = {name: value for name, value in options.items() if name not in _TEXT_OPTIONS}
        return super().__call__(*arguments, **fitting)  # type: ignore[misc]


def drop_text_options(image_processor: HfProcessor) -> None:
    """Drop the tokenizer options that some of mlx-vlm's processors pass to an image processor."""
    kind = type(image_processor)
    if kind.__module__.startswith("transformers."):
        image_processor.__class__ = type(kind.__name__, (_TextOptionsDropped, kind), {})


class _CropsEnded:
    """Mixed into a processor class of mlx-vlm to end its list of crops with zeros."""

    def batchify(self, *arguments: Untyped, **options: Untyped) -> Untyped:
        batch = super().batchify(*arguments, **options)  # type: ignore[misc]
        crops, tiles = batch[_CROPS], batch["images"]
        if crops.ndim == _BATCHED:
            batch[_CROPS] = mx.pad(crops, [(0, 0), (0, tiles.shape[1]), (0, 0)])
        return batch


def end_crops(processor: HfProcessor) -> None:
    """End a processor's crops [B, N, 2] with zeros: mlx-vlm 0.7's model reads one for each tile.

    Without them it reads memory past the end of the array.
    """
    kind = type(processor)
    if hasattr(kind, "batchify"):
        processor.__class__ = type(kind.__name__, (_CropsEnded, kind), {})
