import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_files import medium

from backend.config import MAX_IMAGE_BYTES
from backend.errors import InvalidRequestError
from backend.media.decode import decode_payload

ONLY = "only base64 or a data URI is read"


def lines(text):
    return "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76)) + "\n"


@given(st.binary(min_size=1, max_size=300), st.sampled_from([b"+/", b"-_"]), st.booleans())
def test_every_spelling_of_base64_is_read(data, extra_digits, padded):
    text = base64.b64encode(b"\xff\xd8\xff" + data, extra_digits).decode()
    text = text if padded else text.rstrip("=")
    for payload in (text, f"\n {text}", lines(text), f"data:image/png;base64,{text}"):
        assert decode_payload(medium(payload)) == b"\xff\xd8\xff" + data


@pytest.mark.parametrize("data", [b"\xff\xd8\xff\xe0 jpeg", b"\xff\xfb\x90 mp3", b"\xff\xe3 mp3"])
def test_base64_that_begins_with_a_slash_is_no_path(data):
    payload = base64.b64encode(data).decode()
    assert payload.startswith("/")
    assert decode_payload(medium(payload)) == data


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64,aGk=",
        "DATA:image/svg+xml;charset=utf-8;BASE64,aGk",
        "data:;base64,aGk%3D",
        " data:text/html;base64, a G k = ",
    ],
)
def test_the_type_of_a_data_uri_does_not_matter(uri):
    assert decode_payload(medium(uri)) == b"hi"


@pytest.mark.parametrize(
    "payload",
    [
        "/etc/passwd",
        "/var/lib/image",
        "./image",
        "../image",
        "~/image",
        "C:\\image",
        "file:///etc/passwd",
        "http://127.0.0.1/image",
        "HTTPS://host/image",
        "gopher:image",
    ],
)
def test_a_path_and_an_address_are_refused_as_such(payload):
    with pytest.raises(InvalidRequestError) as caught:
        decode_payload(medium(payload))
    assert str(caught.value) == f"Images[0]: is a path or an address: {ONLY}"


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png,hi", "is a data URI without `;base64`"),
        ("data:image/png", f"is a path or an address: {ONLY}"),
        ("image.png", f"is not base64: {ONLY}"),
        ("<svg/>", f"is not base64: {ONLY}"),
        ("aGk=aGk=", f"is not base64: {ONLY}"),
        ("a", f"is not base64: {ONLY}"),
        ("äGk=", f"is not base64: {ONLY}"),
        ("aGk\0", f"is not base64: {ONLY}"),
    ],
)
def test_anything_else_is_refused(payload, problem):
    with pytest.raises(InvalidRequestError) as caught:
        decode_payload(medium(payload))
    assert str(caught.value) == f"Images[0]: {problem}"


@pytest.mark.slow
def test_a_file_may_be_so_long_and_no_longer():
    assert len(decode_payload(medium(bytes(MAX_IMAGE_BYTES)))) == MAX_IMAGE_BYTES
    with pytest.raises(InvalidRequestError, match="has 20,971,521 bytes, at most 20,971,520"):
        decode_payload(medium(bytes(MAX_IMAGE_BYTES + 1)))
