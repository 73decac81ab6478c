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
from backend.model.checkpoint.config_file import WEIGHTS_PATTERN, read_config
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, one_line
from backend.model.checkpoint.upstream import Network, import_mlx_lm
from backend.model.text.tokenizer import Tokenizer
from backend.model.text.tokenizer_file import follow_held
from backend.model.vision.media_processor import HfProcessor
from common.remedies import vision_command

# Upstream's own arguments.
Untyped: TypeAlias = Any

_TEXT_OPTIONS = ("padding", "padding_side", "add_special_tokens")
_CROPS, _BATCHED = "images_spatial_crop", 3


def mend_processor(processor: HfProcessor) -> None:
    """Fix the known bugs of a processor."""
    kind = type(processor)
    image_processor = getattr(processor, "image_processor", None)
    is_from_transformers = type(image_processor).__module__.startswith("transformers.")
    if kind.__module__.startswith("mlx_vlm.") and is_from_transformers:
        _mix(image_processor, _TextOptionsDropped)
    if hasattr(kind, "batchify"):
        _mix(processor, _CropsEnded)
    if mixin := _MIXINS.get(kind.__name__):
        _mix(processor, mixin)


def _mix(mended: HfProcessor, mixin: type) -> None:
    kind = type(mended)
    mended.__class__ = type(kind.__name__, (mixin, kind), {})


class _LastTokenKept:
    """Mixed into a processor class of mlx-vlm to keep the last token of a prompt.

    Upstream takes it for EOS, which it does not write.
    """

    def process_one(self, **options: Untyped) -> Untyped:
        return super().process_one(**options | {"inference_mode": False})  # type: ignore[misc]


class _FirstTokensKept:
    """Mixed into a processor class of mlx-vlm to keep the first token after each picture.

    Upstream takes it for BOS, which it does not write there.
    """

    tokenizer: Untyped

    def _convert_images_texts_to_inputs(self, *arguments: Untyped, **options: Untyped) -> Untyped:
        own = self.tokenizer
        self.tokenizer = _Beginning(own)
        try:
            return super()._convert_images_texts_to_inputs(*arguments, **options)  # type: ignore[misc]
        finally:
            self.tokenizer = own


class _Beginning:
    """A tokenizer that begins every text with a token."""

    def __init__(self, tokenizer: Untyped) -> None:
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int | None]:
        ids: list[int | None] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids if add_special_tokens else [self.bos_token_id, *ids]


class _TextOptionsDropped:
    """Mixed into an image processor class of transformers to drop tokenizer options.

    Some of mlx-vlm's processors pass them on.
    """

    def __call__(self, *arguments: Untyped, **options: Untyped) -> Untyped:
        fitting = {name: value for name, value in options.items() if name not in _TEXT_OPTIONS}
        return super().__call__(*arguments, **fitting)  # type: ignore[misc]


class _CropsEnded:
    """Mixed into a processor class of mlx-vlm to end its crops [B, N, 2] with zeros.

    The model reads one for each tile. Without them it reads memory past the end of the array.
    """

    def batchify(self, *arguments: Untyped, **options: Untyped) -> Untyped:
        batch = super().batchify(*arguments, **options)  # type: ignore[misc]
        crops, tiles = batch[_CROPS], batch["images"]
        if crops.ndim == _BATCHED:
            batch[_CROPS] = mx.pad(crops, [(0, 0), (0, tiles.shape[1]), (0, 0)])
        return batch


# By processor class.
_MIXINS: Mapping[str, type] = {
    "DeepseekOCRProcessor": _LastTokenKept,
    "DeepseekOCR2Processor": _LastTokenKept,
    "Phi3VProcessor": _FirstTokensKept,
}


# Needs of some of mlx-vlm's processors besides a checkpoint's usual files, by class.
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


# Where mlx-vlm gets the tokenizer of a family, by model type.
_ELSEWHERE: Mapping[str, str] = dict.fromkeys(("moondream1", "moondream2"), "moondream/starmie-v1")
_PROBE = "The quick brown fox, 1234567890 times: naïve? def f(x): return x**2\n"


def require_own_tokenizer(
    options: ModelOptions, directory: Path, model_type: str, tokenizer: Tokenizer
) -> None:
    """Check that a checkpoint's tokenizer is the one that its model was trained with.

    Raises:
        UnsupportedModelError: It is not, or cannot be compared; the message gives a remedy.
    """
    repository = _ELSEWHERE.get(model_type)
    if repository is None:
        return
    try:
        processor = load_processor(options, directory)
    except UPSTREAM_FAILURES:
        processor = None
    if fault := _fault(processor, repository, tokenizer):
        raise UnsupportedModelError(
            f"{directory} is of the model type {model_type!r}, whose tokenizer is {repository}: "
            f"{fault}"
        )


def _fault(processor: HfProcessor | None, repository: str, tokenizer: Tokenizer) -> str | None:
    theirs = getattr(processor, "tokenizer", None)
    if theirs is None:
        return (
            "it cannot be had, to compare that of the checkpoint with it: allow the download, or "
            "put it into the cache of Hugging Face"
        )
    ours = tokenizer.encode(_PROBE, adds_special=False)
    if theirs.encode(_PROBE, add_special_tokens=False) == ours:
        return None
    return f"put the tokenizer files of {repository} in the place of the checkpoint's, another one"
