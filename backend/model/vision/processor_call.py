"""Calls processors of mlx-vlm and of transformers, whose results are untyped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

# Each id that the vocabulary does not have: such ids are below 0 in all checkpoints.
NO_TOKEN = -1

# Values returned by upstream's processors.
Untyped: TypeAlias = Any
# A processor of transformers or of mlx-vlm, which are untyped.
HfProcessor: TypeAlias = Any


def read_prompt(
    processor: HfProcessor, text: str, media: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the non-empty results of a processor for a prompt, by mlx-vlm's names.

    Args:
        processor: Made by mlx-vlm.
        text: The prompt.
        media: Keyword arguments of mlx-vlm's `prepare_inputs`.
    """
    from mlx_vlm.utils import prepare_inputs

    inputs = prepare_inputs(processor, prompts=text, image_token_index=NO_TOKEN, **media)
    inputs.pop("attention_mask", None)
    # Upstream always returns MLX arrays: they must not leave this thread.
    arrays = {name: as_numpy(value) for name, value in inputs.items() if value is not None}
    return {name: array for name, array in arrays.items() if len(array)}


def as_numpy(value: Untyped) -> Untyped:
    """Return an array, or a list of arrays if their shapes differ."""
    import mlx.core as mx
    import numpy as np

    # NumPy has no bfloat16.
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        value = value.astype(mx.float32)
    try:
        return np.atleast_1d(np.array(value))
    except ValueError:
        return [as_numpy(each) for each in value]
