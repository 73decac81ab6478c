"""Fixes bugs of mlx-vlm 0.7's processors."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import mlx.core as mx

from backend.model.vision.processor_call import HfProcessor

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
