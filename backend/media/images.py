"""Decodes image files to upright RGB, at a size that models can take."""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

from PIL import ExifTags, Image

from backend.config import MAX_ASPECT_RATIO, MAX_IMAGE_PIXELS, MAX_JPEG_PIXELS
from backend.errors import InvalidRequestError
from backend.media.container import Container, require_container

IMAGE_FORMATS = (
    Container.PNG,
    Container.JPEG,
    Container.WEBP,
    Container.GIF,
    Container.BMP,
    Container.TIFF,
)
# Undocumented errors that Pillow's readers raise on nonsensical bytes.
DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# ITU T.81, annex B: all but those inside a scan.
_JPEG_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_START_OF_SCAN, _END_OF_IMAGE = b"\xda", b"\xd9"
_WITHOUT_LENGTH = (b"\x01", b"\xd8")
# A typical progressive JPEG has ten; each covers the whole image, however small its data.
_MAX_JPEG_SCANS = 64
_WHITE_16 = 65535.0


def decode_image(field: str, data: bytes) -> Image.Image:
    """Return a picture in RGB, rotated as its EXIF data says and without metadata.

    An animation yields its first frame. Transparent pixels become white. 16-bit grey keeps its
    white point; 32-bit and floating-point grey have none, and are stretched from black to white.
    A JPEG of more than `MAX_IMAGE_PIXELS` is read at a half, a quarter or an eighth of its size.

    Raises:
        InvalidRequestError: The file is not an image, is damaged, too large or too narrow.
    """
    container = require_container(field, data, IMAGE_FORMATS)
    if container is Container.JPEG and _scans(data) > _MAX_JPEG_SCANS:
        raise InvalidRequestError(field, f"is a JPEG of more than {_MAX_JPEG_SCANS} scans")
    with opened(field, data, container) as image:
        is_jpeg = container is Container.JPEG
        check_size(field, image.size, MAX_JPEG_PIXELS if is_jpeg else MAX_IMAGE_PIXELS)
        if image.width * image.height > MAX_IMAGE_PIXELS:
            _reduce(image)
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        picture = to_rgb(image)
        return picture if turn is None else picture.transpose(turn)


def _scans(data: bytes) -> int:
    """Return how many scans a JPEG has before its end, after which phones append a film."""
    count = place = 0
    while count <= _MAX_JPEG_SCANS and (found := _JPEG_MARKER.search(data, place)):
        marker, place = found[1], found.end()
        if marker == _END_OF_IMAGE:
            break
        count += marker == _START_OF_SCAN
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(data[place : place + 2])
    return count


def _reduce(image: Image.Image) -> None:
    """Have a large JPEG decoded at a size that is read."""
    width, height = image.size
    for divisor in (2, 4, 8):
        if -(-width // divisor) * -(-height // divisor) <= MAX_IMAGE_PIXELS:
            image.draft(None, (width // divisor, height // divisor))
            return


@contextmanager
def opened(field: str, data: bytes, container: Container) -> Iterator[Image.Image]:
    """Open an image, reading only its header.

    Raises:
        InvalidRequestError: The file is damaged; also converts errors raised inside the block.
    """
    # Process-wide: Python 3.11 has no narrower way that is thread-safe.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        with Image.open(io.BytesIO(data), formats=(container.value,)) as image:
            yield image
    except Image.DecompressionBombError:
        raise InvalidRequestError(field, f"has more than {MAX_IMAGE_PIXELS:,} pixels") from None
    except DAMAGE:
        raise damaged(field, container) from None


def damaged(field: str, container: Container) -> InvalidRequestError:
    """Return the error for a file that its reader could not decode."""
    problem = f"is not a complete {container.value}: it is damaged or truncated"
    return InvalidRequestError(field, problem)


def check_size(field: str, size: tuple[int, int], most: int = MAX_IMAGE_PIXELS) -> None:
    """Check the size of a picture in pixels (width, height).

    Args:
        most: Maximum number of pixels.

    Raises:
        InvalidRequestError: It is empty, too large, or too narrow for its length.
    """
    width, height = size
    if width < 1 or height < 1:
        raise InvalidRequestError(field, f"has no pixels: {width} x {height}")
    if width * height > most:
        problem = f"has {width:,} x {height:,} pixels, at most {most:,} are read"
        raise InvalidRequestError(field, problem)
    if max(size) > MAX_ASPECT_RATIO * min(size):
        problem = f"has {width:,} x {height:,} pixels, more than {MAX_ASPECT_RATIO} : 1"
        raise InvalidRequestError(field, problem)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return a copy in RGB without metadata, with transparent pixels on white."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        picture = Image.new("RGB", image.size, "white")
        picture.paste(image, mask=image)
    else:
        picture = image.convert("RGB")
    # Otherwise later readers would rotate the image again.
    picture.info = {}
    return picture


def _eight_bits(image: Image.Image) -> Image.Image:
    low, high = _extremes(image)
    if not isfinite(low) or not isfinite(high):
        raise ValueError("a pixel is not a number")
    scale = 255 / ((high - low) or 1)
    wide = image if image.mode == "F" else image.convert("I")
    grey = wide.point(lambda value: value * scale + (0.5 - low * scale)).convert("L")
    grey.info = {}
    return grey


def _extremes(image: Image.Image) -> tuple[float, float]:
    """Return the values mapped to black and white."""
    if image.mode.startswith("I;16"):
        return 0.0, _WHITE_16
    low, high = image.getextrema()
    if isinstance(low, tuple) or isinstance(high, tuple):
        raise TypeError("grey has one band")
    return low, high


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, or 1 (upright) if there is no readable one."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except DAMAGE:
        return 1
    return value if isinstance(value, int) else 1
