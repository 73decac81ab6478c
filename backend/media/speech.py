"""Splits a recording of speech into passages short enough for a model, at quiet moments."""

import base64
import io
import os
import stat
import wave
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import (
    MAX_SPEECH_BYTES,
    MAX_SPEECH_S,
    MAX_SPEECH_SAMPLES,
    SPEECH_PASSAGE_S,
    SPEECH_RATE_HZ,
)
from backend.errors import InvalidRequestError
from backend.media.container import needed

if TYPE_CHECKING:
    from backend.media.audio import Samples

# A passage may end this much earlier, at the quietest moment.
_CUT_RANGE_S = 10
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a recording.

    Attributes:
        start: Index of its first sample, at `SPEECH_RATE_HZ` samples per second.
        samples: Float32 [N], one channel, between -1 and 1.
    """

    start: int
    samples: "Samples" = field(repr=False, compare=False)

    @property
    def start_s(self) -> float:
        """Start time in seconds."""
        return self.start / SPEECH_RATE_HZ

    @property
    def end_s(self) -> float:
        """End time in seconds."""
        return (self.start + len(self.samples)) / SPEECH_RATE_HZ

    def payload(self) -> str:
        """Return it as a WAV file in base64."""
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SPEECH_RATE_HZ)
            file.writeframes((self.samples.clip(-1.0, 1.0) * 32767.0).astype("<i2").tobytes())
        return base64.b64encode(buffer.getvalue()).decode()


def read_speech(field_name: str, path: Path) -> "Samples":
    """Return the samples [N] of a sound file, mixed to mono and resampled.

    Slow: call it on a worker thread.
    """
    with needed("miniaudio", "media"):
        from backend.media.audio import Bounds, decode_audio
    data = _bytes(field_name, path)
    bounds = Bounds(seconds=MAX_SPEECH_S, samples=MAX_SPEECH_SAMPLES)
    return decode_audio(field_name, data, SPEECH_RATE_HZ, bounds)


def _bytes(field_name: str, path: Path) -> bytes:
    """Return the content of a regular file; a pipe might never begin, a device never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise InvalidRequestError(field_name, f"{path} is not a regular file")
            _require_bounded(field_name, about.st_size)
            # The file may have grown, or not report its size.
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_SPEECH_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise InvalidRequestError(field_name, problem) from None
    _require_bounded(field_name, len(data))
    return data


def _require_bounded(field_name: str, size: int) -> None:
    if size > MAX_SPEECH_BYTES:
        problem = f"has {size:,} bytes, at most {MAX_SPEECH_BYTES:,} are read"
        raise InvalidRequestError(field_name, problem)


def passages(samples: "Samples") -> Iterator[Passage]:
    """Yield the passages of a sound in order; together they cover all of it."""
    start = 0
    while start < len(samples):
        stop = _cut(samples, start)
        yield Passage(start, samples[start:stop])
        start = stop


def _cut(samples: "Samples", start: int) -> int:
    """Return where a passage ends: the middle of the quietest moment in its last seconds."""
    latest = start + SPEECH_PASSAGE_S * SPEECH_RATE_HZ
    if latest >= len(samples):
        return len(samples)
    width = int(_PAUSE_S * SPEECH_RATE_HZ)
    earliest = latest - _CUT_RANGE_S * SPEECH_RATE_HZ
    moments = samples[earliest:latest].reshape(-1, width)
    quietest = int((moments**2).mean(axis=1).argmin())
    return earliest + quietest * width + width // 2
