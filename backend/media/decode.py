"""One medium of a request -> pictures or samples, and a digest of what they hold.

Everything here is plain CPU work that may take a second: neither for the event loop nor for the
engine thread. Any number of threads may do it at once. What a library needs is imported on first
use, so that a backend without it serves text.
"""

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, assert_never

from backend.core.media import MediaKind, Medium
from backend.media.libraries import needed
from backend.media.payload import decode_payload

if TYPE_CHECKING:
    from PIL.Image import Image

    from backend.media.audio import Samples
    from backend.media.video import Frame


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A picture in RGB, upright.

    Attributes:
        digest: SHA-256 of size and pixels: the same for one picture in two files, whatever their
            format, metadata and base64. Two values are equal when their digests are.
    """

    image: "Image" = field(repr=False, compare=False)
    digest: bytes


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """A sound.

    Attributes:
        samples: Float32 [N], one channel, between -1 and 1.
        sampling_rate: In Hz, as asked for.
        digest: SHA-256 of rate and samples. Two values are equal when their digests are.
    """

    samples: "Samples" = field(repr=False, compare=False)
    sampling_rate: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """A film, or what stands for it.

    Attributes:
        frames: At least one, all of one size, in RGB and in order.
        digest: SHA-256 of the frames and their times. Two values are equal when their digests are.
    """

    frames: tuple["Frame", ...] = field(repr=False, compare=False)
    digest: bytes


Decoded: TypeAlias = DecodedImage | DecodedAudio | DecodedVideo


def decode(medium: Medium, *, sampling_rate: int) -> Decoded:
    """Return what a medium holds; audios at the given rate in Hz, which others do not look at.

    Raises:
        InvalidRequestError: It is not what its field says, damaged, or beyond a bound.
        UnsupportedError: It takes a library that is not installed.
    """
    data = decode_payload(medium)
    match medium.kind:
        case MediaKind.IMAGE:
            return _image(medium.field, data)
        case MediaKind.AUDIO:
            return _audio(medium.field, data, sampling_rate)
        case MediaKind.VIDEO:
            return _video(medium.field, data)
        case _:
            assert_never(medium.kind)


def _image(field_name: str, data: bytes) -> DecodedImage:
    with needed("Pillow", "media"):
        from backend.media.images import decode_image
    image = decode_image(field_name, data)
    return DecodedImage(image, _image_digest(image))


def _audio(field_name: str, data: bytes, sampling_rate: int) -> DecodedAudio:
    with needed("miniaudio", "media"):
        from backend.media.audio import decode_audio
    samples = decode_audio(field_name, data, sampling_rate)
    digest = hashlib.sha256(struct.pack("<q", sampling_rate))
    digest.update(samples.tobytes())
    return DecodedAudio(samples, sampling_rate, digest.digest())


def _video(field_name: str, data: bytes) -> DecodedVideo:
    with needed("Pillow", "media"):
        from backend.media.video import decode_video
    frames = decode_video(field_name, data)
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(struct.pack("<d", frame.time_s) + _image_digest(frame.image))
    return DecodedVideo(frames, digest.digest())


def _image_digest(image: "Image") -> bytes:
    digest = hashlib.sha256(struct.pack("<qq", *image.size))
    digest.update(image.tobytes())
    return digest.digest()
