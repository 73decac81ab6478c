"""Noise as pictures, sounds and videos: the model's output shows whether it perceived it."""

from typing import assert_never

import numpy as np

from backend.core.media import MediaKind
from backend.model.vision.media_processor import Content, Film

# A non-square picture reveals swapped rows and columns.
_SIDES = ((64, 64), (48, 96))
_FRAMES = 4
_FPS = 2.0
_SECONDS = 1.0
_LOUDNESS = 0.1


def sample(
    kind: MediaKind, *, sampling_rate: int, number: int = 0, has_own_size: bool = True
) -> Content:
    """Return a medium determined by its number.

    Args:
        kind: Of the medium.
        sampling_rate: Rate of a sound, in Hz.
        number: Determines the content.
        has_own_size: Whether the number determines the shape of a picture, too.
    """
    rng = np.random.default_rng(number)
    height, width = _SIDES[number % len(_SIDES) if has_own_size else 0]
    match kind:
        case MediaKind.IMAGE:
            from PIL import Image

            return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        case MediaKind.AUDIO:
            noise = rng.standard_normal(int(_SECONDS * sampling_rate))
            return (_LOUDNESS * noise).astype(np.float32)
        case MediaKind.VIDEO:
            return Film(rng.integers(0, 256, (_FRAMES, height, width, 3), np.uint8), _FPS)
        case _:
            assert_never(kind)
