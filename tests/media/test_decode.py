import base64
import sys

import pytest
from media_files import SOUNDS, animation, encoded, gradient, medium, wav
from PIL import Image

from backend.core.prompt import MediaKind
from backend.errors import InvalidRequestError, UnsupportedError
from backend.media.decode import DecodedAudio, DecodedImage, DecodedVideo, decode
from common.remedies import CHECKOUT

IMAGE, AUDIO, VIDEO = MediaKind.IMAGE, MediaKind.AUDIO, MediaKind.VIDEO
PICTURE = encoded(gradient(), "PNG")


def read(data, kind=IMAGE, sampling_rate=16_000):
    return decode(medium(data, kind), sampling_rate=sampling_rate)


def test_each_kind_has_its_value():
    image, audio, video = read(PICTURE), read(wav(), AUDIO), read(animation("GIF", 2), VIDEO)
    assert isinstance(image, DecodedImage)
    assert isinstance(audio, DecodedAudio)
    assert isinstance(video, DecodedVideo)
    assert image.image.size == (32, 24)
    assert (audio.sampling_rate, len(audio.samples)) == (16_000, 4_000)
    assert len(video.frames) == 2


@pytest.mark.parametrize(
    "other",
    [
        base64.urlsafe_b64encode(PICTURE).decode().rstrip("="),
        f"data:image/jpeg;base64,{base64.b64encode(PICTURE).decode()}",
        encoded(gradient(), "PNG", compress_level=0),
        encoded(gradient(), "BMP"),
        encoded(gradient().convert("RGBA"), "WEBP", lossless=True),
    ],
)
def test_one_picture_in_two_files_has_one_digest(other):
    assert read(other).digest == read(PICTURE).digest
    assert read(other) == read(PICTURE)


@pytest.mark.parametrize(
    "other", [gradient(24, 32), gradient(32, 25), gradient().transpose(Image.Transpose.ROTATE_180)]
)
def test_another_picture_has_another_digest(other):
    assert read(encoded(other, "PNG")) != read(PICTURE)


def test_the_same_bytes_in_another_shape_are_another_picture():
    wide, high = (encoded(Image.new("RGB", size), "PNG") for size in ((4, 2), (2, 4)))
    assert read(wide).digest != read(high).digest


def test_a_sound_has_a_digest_of_its_samples_and_its_rate():
    assert read(wav(), AUDIO) == read(wav(channels=2), AUDIO)
    assert read(wav(), AUDIO) != read(wav(hertz=441), AUDIO)
    assert read(wav(), AUDIO) != read(wav(), AUDIO, sampling_rate=8_000)
    assert read(SOUNDS["flac"], AUDIO) != read(SOUNDS["mp3"], AUDIO)


def test_a_film_has_a_digest_of_its_frames_and_their_times():
    film = read(animation("PNG", 3), VIDEO)
    assert film == read(animation("GIF", 3), VIDEO)
    assert film != read(animation("PNG", 4), VIDEO)
    slower = [Image.new("RGB", (8, 8), (number, 0, 0)) for number in range(3)]
    file = encoded(slower[0], "PNG", save_all=True, append_images=slower[1:], duration=60)
    assert film != read(file, VIDEO)


@pytest.mark.parametrize("kind", MediaKind)
def test_a_file_of_another_kind_is_refused(kind):
    data = wav() if kind is IMAGE else encoded(gradient(), "JPEG")
    with pytest.raises(
        InvalidRequestError, match=r"^Images\[0\]: is (WAV|JPEG); the supported formats are"
    ):
        read(data, kind)


@pytest.mark.parametrize(
    ("kind", "module", "user", "name"),
    [
        (IMAGE, "PIL", "backend.media.images", "Pillow"),
        (VIDEO, "PIL", "backend.media.video", "Pillow"),
        (AUDIO, "miniaudio", "backend.media.audio", "miniaudio"),
    ],
)
def test_without_its_library_a_medium_is_refused_with_what_to_install(
    monkeypatch, kind, module, user, name
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, user, raising=False)
    with pytest.raises(UnsupportedError) as caught:
        read(PICTURE, kind)
    assert str(caught.value) == f"needs {name}: {CHECKOUT}"
