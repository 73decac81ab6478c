import asyncio
import threading
from contextlib import suppress

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, served, steps, stub
from serving import code_of

from backend.config import INLINE_BYTES, INLINE_FIELDS, MAX_MESSAGE_FIELDS, MESSAGE_LIMIT_BYTES
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.pipeline import worker_pool
from backend.rpc.decoding import (
    MAP_ENTRY_FIELDS,
    PACKED_PER_FIELD,
    MalformedError,
    count_fields,
    decode_request,
    find_invalid_utf8,
    largest_field,
    spans,
)
from backend.rpc.server import SERVICES

BAD = b"\xff\xfe"


def field(number, payload):
    """A length-delimited field as it goes over the wire, below 128 in number and size."""
    key = number << 3 | 2
    prefix = bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])
    return prefix + bytes([len(payload)]) + payload


def decode(data, message=pb.PredictOptions):
    return decode_request(message.FromString, message.DESCRIPTOR, data)


def refusal(data):
    with pytest.raises(InvalidRequestError) as caught:
        decode(data)
    return str(caught.value)


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
    assert refusal(data) == f"{path}: is not valid UTF-8"


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\x05ab", b"\x0a", b"\x07", b"\x00\x00"])
def test_garbage_is_refused_as_no_message(data):
    assert refusal(data) == "request: is not a backend.PredictOptions message"


def test_bytes_fields_may_hold_anything():
    reply = pb.Reply(message=BAD)
    assert find_invalid_utf8(reply.SerializeToString(), pb.Reply.DESCRIPTOR) is None


def test_a_message_over_the_limit_is_refused_by_its_largest_field():
    request = pb.PredictOptions(Prompt="x" * MESSAGE_LIMIT_BYTES, Tools="[]")
    assert refusal(request.SerializeToString()).startswith("Prompt: makes a message of 524288")


def test_the_elements_of_a_repeated_field_count_together():
    request = pb.PredictOptions(Prompt="x" * 50, Images=["y" * 30, "y" * 30])
    data = request.SerializeToString()
    assert largest_field(data, pb.PredictOptions.DESCRIPTOR) == "Images"


@given(st.binary(max_size=64))
def test_any_bytes_are_walked_or_refused(data):
    try:
        payloads = [data[span.start : span.end] for span in spans(data, 0, len(data))]
    except MalformedError:
        return
    assert sum(map(len, payloads)) <= len(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused(data):
    with suppress(InvalidRequestError):
        assert isinstance(decode(data), pb.PredictOptions)


@given(st.binary(max_size=64))
def test_counting_never_stops_before_protobuf_does(data):
    """Bytes that protobuf reads whole are counted whole: appended fields are counted too."""
    try:
        pb.PredictOptions.FromString(data)
    except DecodeError:
        return
    counts = count_fields(data + field(13, b"") * 10, pb.PredictOptions.DESCRIPTOR, 1000)
    assert counts["StopPrompts"] >= 10


def count(**fields):
    request = pb.PredictOptions(**fields)
    return count_fields(request.SerializeToString(), request.DESCRIPTOR, MAX_MESSAGE_FIELDS)


def test_fields_are_counted_for_the_outermost_one():
    message = pb.Message(role="user", content="x" * 100)
    assert count(Prompt="x", Messages=[message] * 7) == {"Prompt": 1, "Messages": 7 * 3}
    assert count(EmbeddingTokens=[300] * 3200) == {"EmbeddingTokens": 1 + 3200 / PACKED_PER_FIELD}
    assert count(Metadata={"a": "b", "c": "d"}) == {"Metadata": 2 * (1 + MAP_ENTRY_FIELDS + 2)}
    unknown = b"\xa0\x38\x01" * 5
    assert count_fields(unknown, pb.PredictOptions.DESCRIPTOR, 10) == {"request": 5}


def test_packed_numbers_of_a_fixed_size_are_counted():
    data = pb.ModelOptions(LoraScales=[1.0] * 3200).SerializeToString()
    counts = count_fields(data, pb.ModelOptions.DESCRIPTOR, MAX_MESSAGE_FIELDS)
    assert counts == {"LoraScales": 1 + 3200 / PACKED_PER_FIELD}


@pytest.mark.parametrize("size", [MAX_MESSAGE_FIELDS + 1, 20 * MAX_MESSAGE_FIELDS])
def test_counting_ends_soon_after_the_limit(size):
    counts = count_fields(field(44, b"") * size, pb.PredictOptions.DESCRIPTOR, MAX_MESSAGE_FIELDS)
    assert MAX_MESSAGE_FIELDS < counts.total() <= MAX_MESSAGE_FIELDS + INLINE_FIELDS


# Requests that take protobuf long: each is far under the limit in bytes.
COSTLY = {
    "Messages": field(44, b"") * (MAX_MESSAGE_FIELDS + 1),
    "Metadata": field(52, field(1, b"k") + field(2, b"v")) * 50_000,
    "StopPrompts": field(13, b"") * (MAX_MESSAGE_FIELDS + INLINE_BYTES // 2),
    "EmbeddingTokens": pb.PredictOptions(EmbeddingTokens=[1] * 4_000_000).SerializeToString(),
}


@pytest.mark.parametrize("name", COSTLY)
async def test_a_request_with_too_many_fields_is_refused_by_the_field(name):
    async with served(ScriptedEngine()) as channel:
        predict = channel.unary_unary(
            "/backend.Backend/Predict", response_deserializer=pb.Reply.FromString
        )
        code, details = await code_of(predict(COSTLY[name] + field(1, b"x" * 100)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{name}: makes a message of more than {MAX_MESSAGE_FIELDS} fields")


METHODS = [
    f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods
]
STANDARD = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


@pytest.mark.parametrize("method", METHODS + STANDARD)
async def test_no_method_decodes_too_many_unknown_fields(method):
    unknown = b"\xa0\x38\x01" * (MAX_MESSAGE_FIELDS + 1)
    async with served(ScriptedEngine()) as channel:
        if "Reflection" in method:
            call = channel.stream_stream(method)(iter([unknown]))
        else:
            call = channel.unary_stream(method)(unknown)
        code, details = await code_of(call.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("request: makes a message of more than")


async def test_others_are_answered_while_many_fields_are_counted():
    """A request that waits for its thread holds up neither small ones nor large ones."""
    free = threading.Event()
    many = pb.PredictOptions(Prompt="x", StopPrompts=["a" * 100] * 3000)
    large = pb.PredictOptions(Prompt="x", NegativePrompt="y" * 4_000_000)
    # Counting these would take longer than decoding them.
    small = pb.PredictOptions(Prompt="x", Messages=[pb.Message(role="user", content="hi")] * 9000)
    async with served(ScriptedEngine(steps("ok"))) as channel:
        held = asyncio.ensure_future(worker_pool.run_decoding(free.wait, size_bytes=1))
        try:
            slow = asyncio.ensure_future(stub(channel).Predict(many))
            assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
            for quick in (pb.PredictOptions(Prompt="x"), large, small):
                assert (await stub(channel).Predict(quick)).message == b"ok"
            assert not slow.done()
        finally:
            free.set()
        await held
        assert (await slow).message == b"ok"
