import struct

import numpy as np
import pytest
from media_files import SOUNDS, encoded, gradient, wav

from backend.config import MAX_AUDIO_S
from backend.errors import InvalidRequestError
from backend.media import audio
from backend.media.audio import decode_audio

READ = "the supported formats are WAV, MP3, FLAC, Ogg Vorbis"
ID3 = b"ID3\x04\0\0\0\0\x01\x05" + bytes(133)


def decode(data, sampling_rate=16_000):
    return decode_audio("Audios[0]", data, sampling_rate)


def refusal(data):
    with pytest.raises(InvalidRequestError) as caught:
        decode(data)
    return str(caught.value)


def pitch(samples, sampling_rate=16_000):
    return np.argmax(np.abs(np.fft.rfft(samples))) * sampling_rate / len(samples)


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "vorbis"])
def test_every_format_is_read(name):
    samples = decode(wav() if name == "wav" else SOUNDS[name])
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert pitch(samples) == pytest.approx(440, abs=5)
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("sampling_rate", [8_000, 16_000, 24_000])
def test_a_sound_is_resampled(sampling_rate):
    samples = decode(wav(seconds=0.5, rate=44_100), sampling_rate)
    assert len(samples) == pytest.approx(sampling_rate / 2, abs=2)
    assert pitch(samples, sampling_rate) == pytest.approx(440, abs=3)


def test_channels_are_mixed():
    assert np.array_equal(decode(wav(channels=2)), decode(wav()))


@pytest.mark.parametrize("name", ["mp3", "flac"])
def test_tags_before_a_sound_are_skipped(name):
    assert np.array_equal(decode(ID3 + ID3 + SOUNDS[name]), decode(SOUNDS[name]))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (SOUNDS["opus"], "Ogg Opus"),
        (b"\0\0\0\x20ftypM4A ", "MP4"),
        (b"\xff\xf1\x50\x80", "AAC"),
        (b"<html>", "SVG, HTML or other XML"),
        (encoded(gradient(), "PNG"), "PNG"),
        (b"\xff\xff\xff\xff", "of an unknown format"),
        (b"ID3", "of an unknown format"),
        (b"\0" * 100, "of an unknown format"),
    ],
)
def test_what_is_no_readable_sound_is_named(data, found):
    assert refusal(data) == f"Audios[0]: is {found}; {READ}"


@pytest.mark.parametrize("length", [0, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("tags", [b"", b"LIST\4\0\0\0INFO"])
def test_a_recording_that_was_streamed_has_no_length_and_is_read_to_its_end(length, tags):
    whole = wav()
    streamed = whole[:36] + tags + b"data" + struct.pack("<I", length) + whole[44:]
    assert np.array_equal(decode(streamed), decode(whole))


def test_tags_after_no_samples_are_no_sound():
    assert refusal(wav(seconds=0) + b"LIST\4\0\0\0INFO") == "Audios[0]: has no samples"


@pytest.mark.parametrize("name", ["mp3", "flac"])
def test_of_a_truncated_sound_it_is_what_is_there(name):
    whole = decode(SOUNDS[name])
    assert 0 < len(decode(SOUNDS[name][:800])) < len(whole)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (wav()[:30], "WAV"),
        (SOUNDS["flac"][:20], "FLAC"),
        (SOUNDS["flac"][:30], "FLAC"),
        (SOUNDS["vorbis"][:40], "Ogg Vorbis"),
        (SOUNDS["vorbis"][:100], "Ogg Vorbis"),
        (SOUNDS["vorbis"] + b"\x7fFLAC", "Ogg Vorbis"),
        (ID3 + b"no sound", "MP3"),
    ],
)
def test_a_damaged_sound_is_refused(data, name):
    assert refusal(data) == f"Audios[0]: cannot be decoded as {name}"


def with_rate(rate):
    sound = bytearray(wav())
    sound[24:28] = struct.pack("<I", rate)
    return bytes(sound)


@pytest.mark.parametrize("rate", [0, 1, 2**32 - 1])
def test_a_rate_that_makes_no_sense_is_refused(rate):
    assert refusal(with_rate(rate)) in (
        f"Audios[0]: has 1 channels at {rate} Hz",
        "Audios[0]: cannot be decoded as WAV",
    )


def test_a_rate_of_vorbis_is_looked_at_before_its_decoder_is():
    sound = bytearray(SOUNDS["vorbis"])
    sound[40:44] = struct.pack("<I", 2**32 - 1)
    assert refusal(bytes(sound)) == f"Audios[0]: has 2 channels at {2**32 - 1} Hz"


def test_a_sound_without_samples_is_refused():
    assert refusal(wav(seconds=0)) in (
        "Audios[0]: has no samples",
        "Audios[0]: cannot be decoded as WAV",
    )


def test_a_sound_may_be_so_long_and_no_longer():
    assert len(decode(wav(MAX_AUDIO_S, rate=1_000, hertz=0), 1_000)) == MAX_AUDIO_S * 1_000
    longer = wav(MAX_AUDIO_S + 1, rate=1_000, hertz=0)
    assert refusal(longer) == f"Audios[0]: is longer than the {MAX_AUDIO_S} s that are read"


def test_many_channels_shorten_what_may_be_decoded():
    assert (
        audio.max_seconds("Audios[0]", audio.REQUEST_BOUNDS, rate=8_000, channels=1) == MAX_AUDIO_S
    )
    assert audio.max_seconds("Audios[0]", audio.REQUEST_BOUNDS, rate=192_000, channels=8) == 41


def test_samples_that_are_no_numbers_are_refused():
    sound = bytearray(wav())
    sound[20:22] = struct.pack("<H", 3)
    sound[32:36] = struct.pack("<HH", 4, 32)
    sound[44:48] = struct.pack("<f", float("nan"))
    assert refusal(bytes(sound)) == "Audios[0]: has samples that are not numbers"


def test_a_crash_of_the_decoder_is_a_damaged_sound():
    # One byte of a code book, with which miniaudio 1.71 reads where it must not.
    sound = bytearray(SOUNDS["vorbis"])
    sound[124] = 182
    assert refusal(bytes(sound)) == "Audios[0]: cannot be decoded as Ogg Vorbis"
