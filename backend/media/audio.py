"""Decodes sound files to mono samples at the rate that a model expects."""

import struct
from typing import NamedTuple, TypeAlias

import miniaudio
import numpy as np
from numpy.typing import NDArray

from backend.config import MAX_AUDIO_S, MAX_AUDIO_SAMPLES
from backend.errors import InvalidRequestError
from backend.media import pcm
from backend.media.container import Container, require_container, without_tags

AUDIO_FORMATS = (Container.WAV, Container.MP3, Container.FLAC, Container.VORBIS)

Samples: TypeAlias = NDArray[np.float32]

_RATES = range(1_000, 400_000)
_CHANNELS = range(1, 33)
# The maximum for MP3.
_MP3_SOURCE = (48_000, 2)
_FLAC_IN_OGG = b"\x7fFLAC"
# Those of a WAV before its samples: 12 bytes from the start, and so many at most.
_FIRST_CHUNK, _MAX_CHUNKS = 12, 1000
# Read to the end of the file, as of a pipe.
_UNKNOWN_LENGTH = 2**32 - 1


class Bounds(NamedTuple):
    """Limits of a sound's length, in seconds and in samples (own rate, all channels)."""

    seconds: int = MAX_AUDIO_S
    samples: int = MAX_AUDIO_SAMPLES


REQUEST_BOUNDS = Bounds()


def decode_audio(
    field: str, data: bytes, sampling_rate: int, bounds: Bounds = REQUEST_BOUNDS
) -> Samples:
    """Return samples [N] between -1 and 1, mixed to mono, at the given rate in Hz.

    A truncated file yields the samples that it has, as in players.
    """
    container = require_container(field, data, AUDIO_FORMATS)
    data = without_tags(data)
    if container is Container.WAV:
        data = _with_length(data)
    try:
        seconds = max_seconds(field, bounds, *_source(container, data))
        decode = pcm.isolated_samples if container is Container.VORBIS else pcm.samples
        samples = np.frombuffer(decode(data, sampling_rate, seconds * sampling_rate), np.float32)
    except (pcm.DamagedSoundError, miniaudio.MiniaudioError, struct.error):
        raise InvalidRequestError(field, f"cannot be decoded as {container.value}") from None
    if len(samples) > seconds * sampling_rate:
        raise InvalidRequestError(field, f"is longer than the {seconds} s that are read")
    if not len(samples):
        raise InvalidRequestError(field, "has no samples")
    if not np.isfinite(samples).all():
        raise InvalidRequestError(field, "has samples that are not numbers")
    return samples


def _with_length(data: bytes) -> bytes:
    """Return a WAV without the length 0 that recorders leave before the samples of a stream."""
    start = _FIRST_CHUNK
    for _ in range(_MAX_CHUNKS):
        if start + 8 >= len(data):
            break
        name, size = struct.unpack_from("<4sI", data, start)
        if name == b"data":
            is_streamed = not size and not _is_chunk(data, start + 8)
            length = struct.pack("<I", _UNKNOWN_LENGTH)
            return data[: start + 4] + length + data[start + 8 :] if is_streamed else data
        start += 8 + size + size % 2
    return data


def _is_chunk(data: bytes, start: int) -> bool:
    """Tell whether the chunk of a WAV begins here: of tags, after one of no samples."""
    if start + 8 > len(data):
        return False
    name: bytes
    name, size = struct.unpack_from("<4sI", data, start)
    fits: bool = start + 8 + size <= len(data)
    return fits and name.isascii() and name.isalnum()


def max_seconds(field: str, bounds: Bounds, rate: int, channels: int) -> int:
    """Return the length limit of a sound in seconds, which its rate and channels may lower."""
    if rate not in _RATES or channels not in _CHANNELS:
        raise InvalidRequestError(field, f"has {channels} channels at {rate} Hz")
    return min(bounds.seconds, bounds.samples // (rate * channels))


def _source(container: Container, data: bytes) -> tuple[int, int]:
    """Return the sampling rate and channel count stated in a file."""
    match container:
        case Container.WAV:
            info = miniaudio.wav_get_info(data)
            return info.sample_rate, info.nchannels
        case Container.FLAC:
            # RFC 9639, 8.2: 20 bits of rate, then three bits of channels.
            (word,) = struct.unpack_from(">I", data, 18)
            return word >> 12, (word >> 9 & 7) + 1
        case Container.VORBIS if _FLAC_IN_OGG not in data:
            channels, rate = struct.unpack_from("<BI", data, 39)
            return rate, channels
        case Container.VORBIS:
            # The decoder would play the embedded FLAC, whose rate is unchecked.
            raise pcm.DamagedSoundError
        case _:
            return _MP3_SOURCE
