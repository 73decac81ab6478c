import pytest

from backend.media.container import Container, container_of, without_tags

ID3 = b"ID3\x04\0\0"


@pytest.mark.parametrize(
    ("data", "container"),
    [
        (b"RIFF\0\0\0\0WEBPVP8 ", Container.WEBP),
        (b"RIFF\0\0\0\0WAVEfmt ", Container.WAV),
        (b"RIFF\0\0\0\0AVI LIST", Container.AVI),
        (b"II*\0", Container.TIFF),
        (b"MM\0*", Container.TIFF),
        (b"\0\0\0\x18ftypisom", Container.MP4),
        (b"\xff\xfb\x90\x64", Container.MP3),
        (b"\xff\xf3\x40\xc4", Container.MP3),
        (b"\xff\xf1\x50\x80", Container.AAC),
        (b"\xff\xfb\xf0\x64", None),
        (b"\xff\xfe<\0s\0v\0g\0", None),
        (b"  <?xml version='1.0'?>", Container.XML),
        (b"", None),
    ],
)
def test_a_file_is_known_by_how_it_begins(data, container):
    assert container_of(data) is container


def test_tags_are_as_long_as_four_digits_of_seven_bits_say():
    assert without_tags(ID3 + b"\0\0\1\2" + bytes(130) + b"fLaC") == b"fLaC"
    assert without_tags(ID3 + b"\0\0\0\0" + ID3 + b"\0\0\0\1" + b"\0fLaC") == b"fLaC"
    assert without_tags(ID3 + b"\x7f\x7f\x7f\x7f") == b""
    assert without_tags(ID3) == ID3
