"""Decodes one medium of a request to pixels or samples, with a digest.

Pure CPU work that may take a second; safe on any number of worker threads. Optional libraries
are imported on first use, so a backend without them still serves text.
"""

import binascii
import hashlib
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, assert_never
from urllib.parse import unquote

from backend.core.prompt import MediaKind, Medium
from backend.errors import InvalidRequestError
from backend.media.container import needed

if TYPE_CHECKING:
    from PIL.Image import Image

    from backend.media.audio import Samples
    from backend.media.video import Frame

_ONLY = "only base64 or a data URI is read"
# Base64 beginning with a slash is a JPEG (`/9j/`) or an MP3 (`//`, `/+`); anything else is a path.
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:|[a-z]:\\|~|\.{1,2}/|/(?!9j/|[/+])", re.IGNORECASE)
_DATA_URI = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)
_MAX_HEADER_CHARS = 1024
_STANDARD = bytes.maketrans(b"-_", b"+/")
_WHITESPACE = b" \t\r\n\v\f"


def decode_payload(medium: Medium) -> bytes:
    """Return the file in a medium: standard or URL-safe base64, bare or in a data URI.

    Padding may be missing, and whitespace may occur anywhere. The type stated in a data URI is
    ignored: the file itself decides.

    Raises:
        InvalidRequestError: It is not base64, is empty, or too long.
    """
    data = _from_base64(medium.field, _base64_part(medium.field, medium.payload.lstrip()))
    if not data:
        raise InvalidRequestError(medium.field, "is empty")
    if len(data) > medium.kind.max_bytes:
        problem = f"has {len(data):,} bytes, at most {medium.kind.max_bytes:,} are read"
        raise InvalidRequestError(medium.field, problem)
    return data


def _base64_part(field: str, payload: str) -> str:
    header = _DATA_URI.match(payload, 0, _MAX_HEADER_CHARS)
    if header:
        if not header[1]:
            raise InvalidRequestError(field, "is a data URI without `;base64`")
        body = payload[header.end() :]
        return unquote(body) if "%" in body else body
    if _ADDRESS.match(payload):
        raise InvalidRequestError(field, f"is a path or an address: {_ONLY}")
    return payload


def _from_base64(field: str, text: str) -> bytes:
    try:
        digits = text.encode("ascii").translate(_STANDARD, _WHITESPACE).rstrip(b"=")
        return binascii.a2b_base64(digits + b"=" * (-len(digits) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidRequestError(field, f"is not base64: {_ONLY}") from None


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An upright image in RGB.

    Attributes:
        digest: SHA-256 of size and pixels, independent of file format, metadata and base64. Values
            with equal digests are equal.
    """

    image: "Image" = field(repr=False, compare=False)
    digest: bytes


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """A sound.

    Attributes:
        samples: Float32 [N], one channel, between -1 and 1.
        sampling_rate: In Hz, as requested.
        digest: SHA-256 of rate and samples. Values with equal digests are equal.
    """

    samples: "Samples" = field(repr=False, compare=False)
    sampling_rate: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """A video as a selection of its frames.

    Attributes:
        frames: At least one; all of one size, in RGB, in order.
        digest: SHA-256 of the frames and their times. Values with equal digests are equal.
    """

    frames: tuple["Frame", ...] = field(repr=False, compare=False)
    digest: bytes


Decoded: TypeAlias = DecodedImage | DecodedAudio | DecodedVideo


def decode(medium: Medium, *, sampling_rate: int) -> Decoded:
    """Decode a medium; sounds are resampled to the given rate in Hz.

    Raises:
        InvalidRequestError: It is of another kind than its field, is damaged, or exceeds a limit.
        UnsupportedError: A required library is not installed.
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
