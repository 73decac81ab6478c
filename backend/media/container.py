"""Identifies file formats by their first bytes, never by name or stated type."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum

from backend.errors import InvalidRequestError, UnsupportedError
from common.remedies import install_command


@contextmanager
def needed(library: str, extra: str) -> Iterator[None]:
    """Import optional libraries inside this block.

    Raises:
        UnsupportedError: One is not installed; the message says how to install it.
    """
    try:
        yield
    except ImportError:
        raise UnsupportedError(f"needs {library}: {install_command(extra)}") from None


class Container(Enum):
    """A file format, by the name used in messages and in Pillow."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WEBP"
    GIF = "GIF"
    BMP = "BMP"
    TIFF = "TIFF"
    WAV = "WAV"
    FLAC = "FLAC"
    MP3 = "MP3"
    VORBIS = "Ogg Vorbis"
    OPUS = "Ogg Opus"
    MP4 = "MP4"
    MATROSKA = "WebM"
    AVIF = "AVIF"
    HEIC = "HEIC"
    PDF = "PDF"
    XML = "SVG, HTML or other XML"
    AAC = "AAC"
    AVI = "AVI"


# Offset, bytes, format; the first match wins. ID3 tags precede the sound that they describe.
_SIGNATURES = (
    (0, b"\x89PNG\r\n\x1a\n", Container.PNG),
    (0, b"\xff\xd8\xff", Container.JPEG),
    (0, b"GIF87a", Container.GIF),
    (0, b"GIF89a", Container.GIF),
    (8, b"WEBP", Container.WEBP),
    (8, b"WAVE", Container.WAV),
    (8, b"AVI ", Container.AVI),
    (0, b"II*\0", Container.TIFF),
    (0, b"MM\0*", Container.TIFF),
    (0, b"fLaC", Container.FLAC),
    (28, b"\x01vorbis", Container.VORBIS),
    (28, b"OpusHead", Container.OPUS),
    (4, b"ftypavi", Container.AVIF),
    (4, b"ftyphei", Container.HEIC),
    (4, b"ftypmif1", Container.HEIC),
    (4, b"ftyp", Container.MP4),
    (0, b"\x1a\x45\xdf\xa3", Container.MATROSKA),
    (0, b"%PDF-", Container.PDF),
    (0, b"BM", Container.BMP),
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ID3_HEADER_BYTES = 10


def container_of(data: bytes) -> Container | None:
    """Return the format of a file, or `None` if it is unknown."""
    for start, signature, container in _SIGNATURES:
        if data.startswith(signature, start):
            return container
    if data.startswith(b"ID3"):
        inner = without_tags(data)
        return container_of(inner) or Container.MP3 if len(inner) < len(data) else None
    if data[:512].removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"<"):
        return Container.XML
    return _by_frame_header(data)


def require_container(field: str, data: bytes, readable: Collection[Container]) -> Container:
    """Return the format of a file, which must be among the readable ones."""
    container = container_of(data)
    if container is not None and container in readable:
        return container
    found = container.value if container else "of an unknown format"
    names = ", ".join(each.value for each in readable)
    raise InvalidRequestError(field, f"is {found}; the supported formats are {names}")


def without_tags(data: bytes) -> bytes:
    """Return a sound file without leading ID3v2 tags."""
    start = 0
    while data.startswith(b"ID3", start) and len(data) >= start + _ID3_HEADER_BYTES:
        # Four digits of seven bits each.
        size = 0
        for digit in data[start + 6 : start + _ID3_HEADER_BYTES]:
            size = size << 7 | digit & 0x7F
        start += _ID3_HEADER_BYTES + size
    return data[start:]


def _by_frame_header(data: bytes) -> Container | None:
    """Tell MP3 from AAC, whose frames begin with the same eleven bits.

    ISO 11172-3: layer (two bits; 0 means AAC), bit rate (four bits, not all set) and sampling
    rate (two bits, not both set).
    """
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    if not data[1] & 0x06:
        return Container.AAC
    is_valid = data[2] & 0xF0 != 0xF0 and data[2] & 0x0C != 0x0C and data[1] & 0x18 != 0x08
    return Container.MP3 if is_valid else None
