import io
import struct
import sys
import threading
from contextvars import copy_context

import numpy as np
import pytest
from media_files import animation, encoded, film, gradient, wav

from backend.config import MAX_VIDEO_FRAMES
from backend.errors import InvalidRequestError, UnsupportedError
from backend.media.video import decode_video
from common.remedies import CHECKOUT
from common.rpc import AbandonedError, enter_work

READ = "the supported formats are GIF, WEBP, PNG, MP4, WebM"


def decode(data):
    return decode_video("Videos[0]", data)


def refusal(data):
    with pytest.raises(InvalidRequestError) as caught:
        decode(data)
    return str(caught.value)


def tiny_gif(size, count):
    """Return very many frames of one pixel on a canvas of any size."""
    width, height = size
    head = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    frame = b"\x2c\0\0\0\0\1\0\1\0\0" + b"\2\2\x44\1\0"
    return head + frame * count + b";"


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_frames_of_an_animation_come_in_order_and_with_their_times(file_format):
    options = {"lossless": True} if file_format == "WEBP" else {}
    frames = decode(animation(file_format, 5, **options))
    assert [frame.image.getpixel((0, 0)) for frame in frames] == [(n, 0, 0) for n in range(5)]
    assert [frame.time_s for frame in frames] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])


@pytest.mark.parametrize(
    ("count", "stride"),
    [
        (MAX_VIDEO_FRAMES, 1),
        (MAX_VIDEO_FRAMES + 1, 2),
        (2 * MAX_VIDEO_FRAMES, 2),
        (5 * MAX_VIDEO_FRAMES, 8),
    ],
)
def test_of_many_frames_some_are_taken_evenly(count, stride):
    frames = decode(animation("PNG", count))
    assert [frame.image.getpixel((0, 0))[0] for frame in frames] == list(range(0, count, stride))


@pytest.mark.slow
def test_of_large_frames_fewer_are_taken():
    assert len(decode(tiny_gif((4_000, 4_000), 7))) == 4


def test_a_still_picture_is_a_film_of_one_frame():
    (frame,) = decode(encoded(gradient(), "PNG"))
    assert (frame.image.mode, frame.image.size, frame.time_s) == ("RGB", (32, 24), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (tiny_gif((1, 1), 40_000), "has more than 30,517 frames of 1 x 1 pixels"),
        (tiny_gif((4_000, 4_000), 35), "has more than 31 frames of 4000 x 4000 pixels"),
        (tiny_gif((9_000, 9_000), 2), "has 9,000 x 9,000 pixels, at most 16,777,216 are read"),
        (tiny_gif((1, 900), 2), "has 1 x 900 pixels, more than 200 : 1"),
        (wav(), f"is WAV; {READ}"),
        (encoded(gradient(), "JPEG"), f"is JPEG; {READ}"),
        (animation("GIF", 4)[:40], "is not a complete GIF: it is damaged or truncated"),
    ],
)
def test_what_cannot_be_a_film_is_refused(data, problem):
    assert refusal(data) == f"Videos[0]: {problem}"


def test_a_canvas_that_grows_is_refused():
    # Nine pixels of three bits each, with a code before every two that clears the table.
    codes = [*([4, 0, 0] * 5)[:14], 5]
    pixels = sum(code << 3 * place for place, code in enumerate(codes)).to_bytes(6, "little")
    larger = b"\x2c\0\0\0\0" + struct.pack("<HH", 3, 3) + b"\0\2\6" + pixels + b"\0;"
    assert "changes its size from 1 x 1 to 3 x 3" in refusal(tiny_gif((1, 1), 2)[:-1] + larger)


def test_a_film_needs_a_library_and_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnsupportedError) as caught:
        decode(b"\0\0\0\x20ftypisom")
    assert str(caught.value) == f"needs PyAV: {CHECKOUT}"


@pytest.fixture
def av():
    return pytest.importorskip("av")


@pytest.mark.parametrize(("file_format", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx")])
def test_frames_of_a_film_are_read(av, file_format, codec):
    frames = decode(film(av, 6, file_format=file_format, codec=codec))
    assert [frame.image.size for frame in frames] == [(64, 48)] * 6
    assert [frame.time_s for frame in frames] == pytest.approx([n / 10 for n in range(6)], abs=0.01)
    reds = [frame.image.getpixel((9, 9))[0] for frame in frames]
    assert reds == pytest.approx([n * 8 for n in range(6)], abs=8)


def test_of_a_long_film_some_frames_are_taken(av):
    frames = decode(film(av, 40))
    assert [frame.time_s for frame in frames] == pytest.approx([n / 5 for n in range(20)])


def test_a_film_is_turned_as_its_camera_says(av):
    data = film(av, 1)
    clockwise = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    start = data.index(upright, data.index(b"tkhd"))
    (frame,) = decode(data[:start] + clockwise + data[start + len(upright) :])
    assert frame.image.size == (48, 64)


@pytest.mark.parametrize("end", [40, 200, 600])
def test_a_truncated_film_is_refused(av, end):
    assert refusal(film(av)[:end]) in (
        "Videos[0]: is not a complete MP4: it is damaged or truncated",
        "Videos[0]: has no frames",
    )


def test_a_sound_in_the_container_of_a_film_has_no_frames(av):
    assert refusal(sound_in_mp4(av)) == "Videos[0]: has no frames"


def sound_in_mp4(av):
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8_000)
        stream.layout = "mono"
        silence = np.zeros((1, 8_000), np.float32)
        frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
        frame.sample_rate = 8_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("make", ["animation", "film"])
def test_a_film_that_nobody_waits_for_is_left_between_two_frames(make):
    """Near the limit of its frames it takes minutes."""
    left = threading.Event()
    data = animation("PNG", 3) if make == "animation" else film(pytest.importorskip("av"), 3)

    def read():
        enter_work(left)
        assert len(decode(data)) == 3
        left.set()
        with pytest.raises(AbandonedError):
            decode(data)
        return "left"

    assert copy_context().run(read) == "left"
