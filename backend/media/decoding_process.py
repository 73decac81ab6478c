"""The process that decodes media, the most complex data that callers send.

`decoder_pool` starts it. A decoder that crashes, or takes too much time or memory, ends it alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, assert_never

import msgspec
from msgspec import Struct

from backend.config import MAX_DECODE_CPU_S, MAX_DECODE_MEMORY_BYTES
from backend.core.prompt import MediaKind, Medium
from backend.errors import InvalidRequestError, UnsupportedError
from backend.media.decode import Decoded, DecodedAudio, DecodedImage, DecodedVideo, decode
from common.child import limit_memory, limit_time, serve
from common.machine_memory import trim

if TYPE_CHECKING:
    from PIL.Image import Image

# It ends when nobody has needed it for so long.
IDLE_S = 300.0
_BAND_BYTES = 2**20
_TRIM_BYTES = 2**22


class Job(Struct, frozen=True, array_like=True):
    """To the process: decode a medium; see `backend.media.decode.decode`."""

    kind: MediaKind
    field: str
    payload: str
    sampling_rate: int


class Sound(Struct, frozen=True, tag=True, array_like=True):
    """From the process: a sound, before its samples in so many answers."""

    digest: bytes
    answers: int


class Pictures(Struct, frozen=True, tag=True, array_like=True):
    """From the process: a picture or a film, before its pixels.

    Attributes:
        size: Width and height of each picture.
        times_s: Of each picture of a film; none for a single picture.
        band: Rows of a picture in an answer; its last one may have fewer.
    """

    digest: bytes
    size: tuple[int, int]
    times_s: tuple[float, ...]
    band: int


class Refusal(Struct, frozen=True, tag=True, array_like=True):
    """From the process: why the field cannot be decoded; without a field, by this installation."""

    field: str
    problem: str


Head: TypeAlias = Sound | Pictures | Refusal


def main(descriptor: int) -> None:
    """Serve jobs until the other end of the socket is closed."""
    with suppress(ImportError):
        from backend.media import images  # noqa: F401 (its time is that of the start)
    limit_memory(MAX_DECODE_MEMORY_BYTES)
    serve(descriptor, _answers, idle_s=IDLE_S)


def _answers(data: bytes) -> Iterator[bytes]:
    limit_time(MAX_DECODE_CPU_S)
    size = 0
    for answer in _decoded(msgspec.msgpack.decode(data, type=Job)):
        size += len(answer)
        yield answer
    if size >= _TRIM_BYTES:
        trim()


def _decoded(job: Job) -> Iterator[bytes]:
    medium = Medium(job.kind, job.field, job.payload)
    try:
        decoded = decode(medium, sampling_rate=job.sampling_rate)
    except InvalidRequestError as error:
        yield msgspec.msgpack.encode(Refusal(error.field, error.problem))
    except UnsupportedError as error:
        yield msgspec.msgpack.encode(Refusal("", str(error)))
    else:
        yield from _spelled(decoded)


def _spelled(decoded: Decoded) -> Iterator[bytes]:
    match decoded:
        case DecodedImage():
            yield from _pictures(decoded.digest, [decoded.image], ())
        case DecodedVideo():
            times_s = tuple(frame.time_s for frame in decoded.frames)
            yield from _pictures(decoded.digest, [each.image for each in decoded.frames], times_s)
        case DecodedAudio():
            samples = decoded.samples.tobytes()
            starts = range(0, len(samples), _BAND_BYTES)
            yield msgspec.msgpack.encode(Sound(decoded.digest, len(starts)))
            yield from (samples[start : start + _BAND_BYTES] for start in starts)
        case _:
            assert_never(decoded)


def _pictures(
    digest: bytes, images: "Sequence[Image]", times_s: tuple[float, ...]
) -> Iterator[bytes]:
    width, height = images[0].size
    band = max(1, _BAND_BYTES // (3 * width))
    yield msgspec.msgpack.encode(Pictures(digest, (width, height), times_s, band))
    for image in images:
        for top in range(0, height, band):
            yield image.crop((0, top, width, min(top + band, height))).tobytes()
