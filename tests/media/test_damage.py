"""Whatever is done to an honest file, it is read or refused: nothing else, and in no time."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from media_files import SOUNDS, animation, encoded, film, gradient, wav
from PIL import Image

from backend.errors import InvalidRequestError
from backend.media.audio import decode_audio
from backend.media.images import decode_image
from backend.media.video import decode_video

ORIENTED = Image.Exif()
ORIENTED[0x0112] = 6
IMAGES = {
    **{name: encoded(gradient(), name, exif=ORIENTED) for name in ("PNG", "JPEG", "WEBP", "TIFF")},
    **{name: encoded(gradient(), name) for name in ("GIF", "BMP")},
    "progressive": encoded(gradient(), "JPEG", progressive=True),
    "palette": encoded(gradient().convert("P"), "PNG", transparency=3),
    "alpha": encoded(gradient().convert("LA"), "PNG"),
    "deep": encoded(gradient().convert("I"), "TIFF"),
    "float": encoded(gradient().convert("F"), "TIFF"),
    "cmyk": encoded(gradient().convert("CMYK"), "JPEG"),
    "deflate": encoded(gradient(), "TIFF", compression="tiff_adobe_deflate"),
}
ANIMATIONS = {name: animation(name, 4) for name in ("GIF", "WEBP", "PNG")}
# Vorbis, which takes a process each, is left to `test_audio`.
AUDIOS = {"wav": wav(seconds=0.05), "mp3": SOUNDS["mp3"], "flac": SOUNDS["flac"]}

quickly = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def damaged(draw, data):
    """Draw a file with some bits flipped, more of them near its head, and cut short or not."""
    spoiled = bytearray(data)
    for _ in range(draw(st.integers(0, 8))):
        end = draw(st.sampled_from([64, 512, len(data)]))
        position = draw(st.integers(0, min(end, len(data)) - 1))
        spoiled[position] ^= 1 << draw(st.integers(0, 7))
    length = draw(st.one_of(st.just(len(data)), st.integers(1, len(data))))
    return bytes(spoiled[:length])


def read_or_refuse(decode, data):
    try:
        decode(data)
    except InvalidRequestError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("name", IMAGES)
@quickly
@given(data=st.data())
def test_a_damaged_image_is_read_or_refused(name, data):
    spoiled = data.draw(damaged(IMAGES[name]))
    problem = read_or_refuse(lambda file: decode_image("Images[0]", file), spoiled)
    assert not problem or problem.startswith("Images[0]: ")


@pytest.mark.parametrize("name", ANIMATIONS)
@quickly
@given(data=st.data())
def test_a_damaged_animation_is_read_or_refused(name, data):
    spoiled = data.draw(damaged(ANIMATIONS[name]))
    problem = read_or_refuse(lambda file: decode_video("Videos[0]", file), spoiled)
    assert not problem or problem.startswith("Videos[0]: ")


@pytest.mark.parametrize("name", AUDIOS)
@quickly
@given(data=st.data())
def test_a_damaged_sound_is_read_or_refused(name, data):
    spoiled = data.draw(damaged(AUDIOS[name]))
    problem = read_or_refuse(lambda file: decode_audio("Audios[0]", file, 16_000), spoiled)
    assert not problem or problem.startswith("Audios[0]: ")


@quickly
@given(st.binary(max_size=400))
def test_noise_is_read_or_refused(noise):
    for head in (b"", b"ID3", b"\xff\xd8\xff", b"GIF89a", b"BM", b"II*\0", b"fLaC"):
        read_or_refuse(lambda file: decode_image("Images[0]", file), head + noise)
        read_or_refuse(lambda file: decode_audio("Audios[0]", file, 16_000), head + noise)
        read_or_refuse(lambda file: decode_video("Videos[0]", file), head + noise)


def test_a_damaged_film_is_read_or_refused():
    whole = film(pytest.importorskip("av"))
    chance = random.Random(1)
    for _ in range(60):
        spoiled = bytearray(whole)
        for _ in range(4):
            spoiled[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        read_or_refuse(lambda file: decode_video("Videos[0]", file), bytes(spoiled))
