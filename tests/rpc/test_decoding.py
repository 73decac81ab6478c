import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config import MESSAGE_LIMIT_BYTES
from backend.pb import backend_pb2 as pb
from backend.rpc.decoding import (
    MalformedError,
    Undecodable,
    decode_request,
    fields,
    find_invalid_utf8,
    largest_field,
)

BAD = b"\xff\xfe"


def field(number, payload):
    """A length-delimited field as it goes over the wire, below 128 in number and size."""
    key = number << 3 | 2
    prefix = bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])
    return prefix + bytes([len(payload)]) + payload


def decode(data, message=pb.PredictOptions):
    return decode_request(message.FromString, message.DESCRIPTOR, data)


def test_a_good_message_is_decoded():
    request = pb.PredictOptions(Prompt="ö", Temperature=0.5, Tokens=-1, Metadata={"a": "b"})
    assert decode(request.SerializeToString()) == request


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (field(1, BAD), "Prompt"),
        (field(1, b"fine") + field(48, BAD), "Tools"),
        (field(13, b"a") + field(13, BAD), "StopPrompts[1]"),
        (field(44, field(1, b"user")) + field(44, field(2, BAD)), "Messages[1].content"),
        (field(52, field(1, b"key") + field(2, BAD)), "Metadata"),
        (b"\x10\x96\x01" + b"\x4d\0\0\0\0" + field(1, BAD), "Prompt"),
    ],
)
def test_text_that_is_no_utf8_is_refused_by_its_field(data, path):
    refused = decode(data)
    assert isinstance(refused, Undecodable)
    assert str(refused.error) == f"{path}: is not valid UTF-8"


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\x05ab", b"\x0a", b"\x07", b"\x00\x00"])
def test_garbage_is_refused_as_no_message(data):
    refused = decode(data)
    assert isinstance(refused, Undecodable)
    assert str(refused.error) == "request: is not a backend.PredictOptions message"


def test_bytes_fields_may_hold_anything():
    reply = pb.Reply(message=BAD)
    assert find_invalid_utf8(reply.SerializeToString(), pb.Reply.DESCRIPTOR) is None


def test_a_message_over_the_limit_is_refused_by_its_largest_field():
    request = pb.PredictOptions(Prompt="x" * MESSAGE_LIMIT_BYTES, Tools="[]")
    refused = decode(request.SerializeToString())
    assert isinstance(refused, Undecodable)
    assert str(refused.error).startswith("Prompt: makes a message of 524288")


def test_the_elements_of_a_repeated_field_count_together():
    request = pb.PredictOptions(Prompt="x" * 50, Images=["y" * 30, "y" * 30])
    data = request.SerializeToString()
    assert largest_field(data, pb.PredictOptions.DESCRIPTOR) == "Images"


@given(st.binary(max_size=64))
def test_any_bytes_are_walked_or_refused(data):
    try:
        payloads = [payload or b"" for _, payload in fields(data)]
    except MalformedError:
        return
    assert sum(map(len, payloads)) <= len(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused(data):
    assert isinstance(decode(data), pb.PredictOptions | Undecodable)
