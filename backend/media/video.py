"""Decodes videos and animated images to a few evenly spaced frames."""

import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from PIL import Image

from backend.config import (
    MAX_ANIMATION_DECODED_PIXELS,
    MAX_FILM_DECODED_PIXELS,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_PIXELS,
)
from backend.errors import InvalidRequestError
from backend.media.container import Container, needed, require_container
from backend.media.images import DAMAGE, check_size, damaged, opened, to_rgb
from common.rpc import require_caller

ANIMATION_FORMATS = (Container.GIF, Container.WEBP, Container.PNG)
FILM_FORMATS = (Container.MP4, Container.MATROSKA)
# Fixed, not detected: some of FFmpeg's formats open other files.
_DEMUXERS = {Container.MP4: "mov", Container.MATROSKA: "matroska"}
# The cost of the smallest frame, in pixels.
_FRAME_COST = 1 << 14

# PyAV is optional, so its values are untyped.
AvContainer: TypeAlias = Any
AvFrame: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Frame:
    """An RGB image, and its time in seconds from the start."""

    image: Image.Image
    time_s: float


@dataclass(frozen=True, slots=True)
class _Shown:
    """A decoded but unconverted frame; valid until the next one is decoded."""

    size: tuple[int, int]
    time_s: float
    picture: Callable[[], Image.Image]


def decode_video(field: str, data: bytes) -> tuple[Frame, ...]:
    """Return at least one frame and at most `MAX_VIDEO_FRAMES`, all of one size.

    Takes every frame of a short video, and every second, fourth, eighth and so on of a longer
    one, so the length need not be known.
    """
    container = require_container(field, data, ANIMATION_FORMATS + FILM_FORMATS)
    read = _film if container in FILM_FORMATS else _animation
    frames = read(field, data, container)
    if not frames:
        raise InvalidRequestError(field, "has no frames")
    return tuple(frames)


def _sampled(field: str, shown: Iterator[_Shown], max_decoded_pixels: int) -> list[Frame]:
    kept: list[Frame] = []
    stride = 1
    for index, frame in enumerate(_within(field, shown, max_decoded_pixels)):
        if index % stride:
            continue
        kept.append(Frame(frame.picture(), frame.time_s))
        pixels = frame.size[0] * frame.size[1]
        if len(kept) > max(1, min(MAX_VIDEO_FRAMES, MAX_VIDEO_PIXELS // pixels)):
            kept, stride = kept[::2], stride * 2
    return kept


def _within(field: str, shown: Iterator[_Shown], max_decoded_pixels: int) -> Iterator[_Shown]:
    """Pass frames on; refuse frames of other sizes, and too many of them."""
    width = height = 0
    for index, frame in enumerate(shown):
        require_caller()
        if index == 0:
            width, height = frame.size
        if frame.size != (width, height):
            then = f"{frame.size[0]} x {frame.size[1]}"
            problem = f"changes its size from {width} x {height} to {then} pixels"
            raise InvalidRequestError(field, problem)
        most = max_decoded_pixels // max(width * height, _FRAME_COST)
        if index >= most:
            problem = f"has more than {most:,} frames of {width} x {height} pixels"
            raise InvalidRequestError(field, problem)
        yield frame


def _animation(field: str, data: bytes, container: Container) -> list[Frame]:
    with opened(field, data, container) as image:
        return _sampled(field, _animation_frames(field, image), MAX_ANIMATION_DECODED_PIXELS)


def _animation_frames(field: str, image: Image.Image) -> Iterator[_Shown]:
    time_ms = 0.0
    for index in itertools.count():
        try:
            image.seek(index)
        except EOFError:
            return
        check_size(field, image.size)
        image.load()
        yield _Shown(image.size, time_ms / 1000, partial(to_rgb, image))
        time_ms += float(image.info.get("duration", 0))


def _film(field: str, data: bytes, container: Container) -> list[Frame]:
    with needed("PyAV", "video"):
        import av
    try:
        with av.open(io.BytesIO(data), format=_DEMUXERS[container]) as film:
            return _sampled(field, _film_frames(field, film), MAX_FILM_DECODED_PIXELS)
    except (av.FFmpegError, *DAMAGE):
        raise damaged(field, container) from None


def _film_frames(field: str, film: AvContainer) -> Iterator[_Shown]:
    for stream in film.streams.video[:1]:
        check_size(field, (stream.width, stream.height))
        for frame in film.decode(stream):
            size = (frame.width, frame.height)
            check_size(field, size)
            yield _Shown(size, frame.time or 0.0, partial(_upright, frame))


def _upright(frame: AvFrame) -> Image.Image:
    """Rotate a frame upright: the file states a rotation to the left, in degrees."""
    image: Image.Image = frame.to_image()
    image.info = {}
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
