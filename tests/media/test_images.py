import os
import subprocess
import sys
from pathlib import Path

import pytest
from media_files import SOUNDS, animation, encoded, gradient, png_of_size
from PIL import ExifTags, Image, ImageChops

from backend.config import MAX_ASPECT_RATIO
from backend.errors import InvalidRequestError
from backend.media.images import decode_image

LOSSLESS = ("PNG", "BMP", "TIFF")
LOSSY = ("JPEG", "WEBP", "GIF")


def decode(data):
    return decode_image("Images[0]", data)


def refusal(data):
    with pytest.raises(InvalidRequestError) as caught:
        decode(data)
    return str(caught.value)


def distance(one, other):
    """Return the greatest difference of any channel of any pixel."""
    return max(high for _, high in ImageChops.difference(one, other).getextrema())


@pytest.mark.parametrize("file_format", LOSSLESS + LOSSY)
def test_every_format_is_read(file_format):
    picture = gradient()
    options = {"lossless": True} if file_format == "WEBP" else {}
    decoded = decode(encoded(picture, file_format, **options))
    assert (decoded.mode, decoded.size) == ("RGB", picture.size)
    assert distance(decoded, picture) <= (0 if file_format in LOSSLESS else 40)


@pytest.mark.parametrize(
    ("mode", "file_format"),
    [
        ("1", "PNG"),
        ("L", "PNG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("RGBA", "PNG"),
        ("RGBA", "WEBP"),
        ("P", "GIF"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
        ("YCbCr", "JPEG"),
        ("1", "TIFF"),
        ("L", "BMP"),
    ],
)
def test_every_mode_becomes_rgb(mode, file_format):
    picture = gradient().convert(mode)
    decoded = decode(encoded(picture, file_format))
    assert decoded.mode == "RGB"
    assert distance(decoded, picture.convert("RGB")) <= 24


def grey(mode, values):
    picture = Image.new(mode, (len(values), 1))
    picture.putdata(values)
    return picture


@pytest.mark.parametrize(
    ("mode", "file_format", "values", "expected"),
    [
        ("I;16", "PNG", [0, 128 * 257, 65535], [0, 128, 255]),
        ("I;16", "TIFF", [0, 257, 65535], [0, 1, 255]),
        ("I;16", "PNG", [257, 2 * 257, 3 * 257], [1, 2, 3]),
        ("I", "TIFF", [-1000, 0, 1000], [0, 128, 255]),
        ("F", "TIFF", [0.0, 0.2, 1.0], [0, 51, 255]),
        ("F", "TIFF", [-3e38, 0.0, 3e38], [0, 128, 255]),
        ("F", "TIFF", [7.0, 7.0, 7.0], [0, 0, 0]),
    ],
)
def test_deep_grey_keeps_its_shades(mode, file_format, values, expected):
    decoded = decode(encoded(grey(mode, values), file_format))
    assert [decoded.getpixel((x, 0))[0] for x in range(3)] == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pixels_that_are_no_numbers_are_refused(value):
    data = encoded(grey("F", [value, 0.0, 1.0]), "TIFF")
    assert refusal(data) == "Images[0]: is not a complete TIFF: it is damaged or truncated"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode):
    picture = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (0, 0, 0, 255))
    decoded = decode(encoded(picture.convert(mode), "PNG"))
    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (0, 0, 0)]


def test_a_palette_entry_can_be_transparent():
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putpixel((1, 0), 1)
    decoded = decode(encoded(picture, "PNG", transparency=0))
    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (40, 50, 60)]


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_camera_says_and_only_once(file_format, orientation):
    upright = Image.new("RGB", (16, 32), "white")
    upright.paste("black", (0, 0, 8, 8))
    # How a camera that was held like this stores the picture: the inverse of the readers' turn.
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    decoded = decode(encoded(stored, file_format, exif=exif))
    assert decoded.size == (16, 32)
    assert distance(decoded, upright) < 40
    assert not decoded.getexif()


def test_an_orientation_that_makes_no_sense_is_upright():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 99
    assert decode(encoded(gradient(), "JPEG", exif=exif)).size == (32, 24)
    assert decode(encoded(gradient(), "JPEG", exif=b"Exif\0\0garbage")).size == (32, 24)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_it_is_the_first_frame(file_format):
    options = {"lossless": True} if file_format == "WEBP" else {}
    assert decode(animation(file_format, 3, **options)).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG, HTML or other XML"),
        (b"\xef\xbb\xbf\n<!doctype html><html></html>", "SVG, HTML or other XML"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\0\0\0\x20ftypavif", "AVIF"),
        (b"\0\0\0\x20ftypheic", "HEIC"),
        (SOUNDS["mp3"], "MP3"),
        (b"just text", "of an unknown format"),
        (b"\0", "of an unknown format"),
        (bytes(40 * 2**10), "of an unknown format"),
    ],
)
def test_what_is_no_picture_is_named(data, found):
    read = "the supported formats are PNG, JPEG, WEBP, GIF, BMP, TIFF"
    assert refusal(data) == f"Images[0]: is {found}; {read}"


@pytest.mark.parametrize("file_format", LOSSLESS + LOSSY)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_refused(file_format, share):
    data = encoded(gradient(200, 200), file_format)
    problem = f"is not a complete {file_format}: it is damaged or truncated"
    assert refusal(data[: int(len(data) * share)]) == f"Images[0]: {problem}"


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ((1, 20_000), "has 1 x 20,000 pixels, more than 200 : 1"),
        ((201, 1), "has 201 x 1 pixels, more than 200 : 1"),
        ((4_097, 4_096), "has 4,097 x 4,096 pixels, at most 16,777,216 are read"),
        ((50_000, 50_000), "has more than 16,777,216 pixels"),
        ((0, 5), "is not a complete PNG: it is damaged or truncated"),
    ],
)
def test_a_picture_is_refused_by_the_size_that_it_claims(size, problem):
    assert refusal(png_of_size(*size)) == f"Images[0]: {problem}"


def test_the_narrowest_picture_is_read():
    assert decode(encoded(gradient(MAX_ASPECT_RATIO, 1), "PNG")).size == (MAX_ASPECT_RATIO, 1)


@pytest.mark.parametrize(
    ("size", "read"), [((4_096, 4_096), (4_096, 4_096)), ((6_000, 4_000), (3_000, 2_000))]
)
def test_a_large_jpeg_is_decoded_at_a_half(size, read):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    decoded = decode(encoded(Image.new("RGB", size, (200, 100, 50)), "JPEG", exif=exif))
    assert decoded.size == read[::-1]
    assert distance(decoded, Image.new("RGB", decoded.size, (200, 100, 50))) < 4


def test_a_jpeg_has_a_limit_too():
    data = encoded(Image.new("L", (8_193, 8_192)), "JPEG", quality=1)
    assert refusal(data) == "Images[0]: has 8,193 x 8,192 pixels, at most 67,108,864 are read"


def test_a_jpeg_of_very_many_scans_is_refused():
    data = encoded(gradient(), "JPEG", progressive=True)
    last_scan = data[data.rfind(b"\xff\xda") : -2]
    assert refusal(data[:-2] + last_scan * 60 + data[-2:]) == (
        "Images[0]: is a JPEG of more than 64 scans"
    )


def test_what_a_phone_appends_to_a_jpeg_or_writes_into_it_is_no_scan():
    film = b"\0\0\0\x18ftypmp42" + b"\xff\xda" * 100
    profile = b"\xff\xda" * 100
    photo = encoded(gradient(), "JPEG", icc_profile=profile, comment=profile)
    assert distance(decode(photo + film), decode(photo)) == 0


PROBE = """
import resource, sys
from media_files import encoded, png_of_size
from PIL import Image
from backend.errors import InvalidRequestError
from backend.media.images import decode_image

hostile = [
    encoded(Image.new("1", (12_000, 12_000)), "PNG"),
    png_of_size(7_000, 7_000)[:60],
    png_of_size(1, 20_000),
    png_of_size(50_000, 50_000),
    b"<svg/>" + bytes(40 * 2**20),
]
decode_image("Images[0]", encoded(Image.new("RGB", (9, 9)), "PNG"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in hostile:
    try:
        decode_image("Images[0]", data)
    except InvalidRequestError:
        continue
    sys.exit("was read")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


ANIMATED_AND_CHUNKED = """
import resource, struct, zlib
from contextlib import suppress
from media_files import encoded
from PIL import Image
from backend.errors import InvalidRequestError
from backend.media.images import decode_image

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

def deflated(megabytes):
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(megabytes)) + packer.flush()

plain = encoded(Image.new("RGB", (9, 9)), "PNG")
after_header = 33
header, rest = plain[:after_header], plain[after_header:]
frame = bytes.fromhex("21f9040001000000 2c000000000100010000 02024401 00")
still = encoded(Image.new("P", (9, 9)), "GIF")
hostile = [
    still[:-1] + frame * 100_000 + still[-1:],
    header + chunk(b"acTL", struct.pack(">II", 2**32 - 1, 0)) + rest,
    header + chunk(b"tEXt", b"a\\0b") * 20_000 + rest,
    header + chunk(b"zTXt", b"a\\0\\0" + deflated(256)) + rest,
    header + chunk(b"iTXt", b"a\\0\\1\\0\\0\\0" + deflated(256)) + rest,
    header + chunk(b"iCCP", b"a\\0\\0" + deflated(256)) + rest,
    header + chunk(b"IDAT", deflated(256)) + rest[-12:],
]
decode_image("Images[0]", plain)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in hostile:
    with suppress(InvalidRequestError):
        assert decode_image("Images[0]", data).size == (9, 9)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("probe", [PROBE, ANIMATED_AND_CHUNKED])
def test_a_bomb_takes_no_memory(probe):
    support = Path(__file__).parent.parent / "support"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(support), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kilobytes = int(done.stdout) // (1024 if sys.platform == "darwin" else 1)
    assert kilobytes < 8 * 1024
