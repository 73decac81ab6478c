"""Floods of calls, and requests of which only a part arrives, through the real socket."""

import asyncio
import socket
from contextlib import closing

import grpc
import grpc.aio
import pytest
from http2 import DATA, END_STREAM, PREFACE, RESET, frame, opened, read_frames
from scripted_engine import TIMEOUT_S, ScriptedEngine, served, server_of, steps, stub
from serving import code_of, handled
from waiting import until

from backend.config import MAX_ARRIVING, MAX_STREAMS
from backend.pb import backend_pb2 as pb
from backend.rpc.arrivals import ArrivalInterceptor

CODE = grpc.StatusCode
HELLO = pb.PredictOptions(Prompt="hi")
METHODS = ["Predict", "PredictStream"]
PREDICT = "/backend.Backend/Predict"
EXCESS = 20


def begun(channel, method):
    """Return a call whose request is still to be sent."""
    kind = channel.stream_stream if method == "PredictStream" else channel.stream_unary
    return kind(f"/backend.Backend/{method}")()


def echoing(**limits):
    """Yield a channel to a server with a handler of each kind, which return the request."""

    async def answer(request, _context):
        return request

    async def stream(request, context):
        await context.write(request)

    handlers = {
        "Predict": grpc.unary_unary_rpc_method_handler(answer),
        "PredictStream": grpc.unary_stream_rpc_method_handler(stream),
    }
    return handled("backend.Backend", handlers, ArrivalInterceptor(**limits))


@pytest.mark.parametrize("method", METHODS)
async def test_of_too_many_arriving_requests_only_those_beyond_the_limit_are_given_up(method):
    async with served(ScriptedEngine(steps("ok"))) as channel:
        calls = [begun(channel, method) for _ in range(MAX_ARRIVING + EXCESS)]
        await until(lambda: sum(call.done() for call in calls) >= EXCESS, timeout_s=TIMEOUT_S)
        assert (await stub(channel).Predict(HELLO)).message == b"ok"
        given_up = [call for call in calls if call.done()]
        assert len(given_up) == EXCESS
        assert {await call.code() for call in given_up} == {CODE.RESOURCE_EXHAUSTED}
        assert "not arrived in full" in await given_up[0].details()
        for call in calls:
            call.cancel()


def part_sent(number):
    part = b"\0" + (2**20).to_bytes(4, "big") + bytes(500)
    return opened(number, PREDICT) + frame(DATA, 0, number, part)


def reset(number):
    return opened(number, PREDICT) + frame(RESET, 0, number, bytes(4))


def watching(number):
    return opened(number, "/grpc.health.v1.Health/Watch") + frame(
        DATA, END_STREAM, number, bytes(5)
    )


@pytest.mark.parametrize(
    ("sent", "count", "ended"),
    [
        (part_sent, MAX_ARRIVING + EXCESS, EXCESS),
        (reset, 20_000, 10_000),
        (watching, 2000, 2000 - MAX_STREAMS - EXCESS),
    ],
)
async def test_what_one_caller_can_have_open_is_bounded(sent, count, ended):
    flood = PREFACE + b"".join(map(sent, range(1, 2 * count, 2)))
    server = server_of(ScriptedEngine(steps("ok")))
    host, port = (await server.start()).rsplit(":", 1)
    with closing(socket.create_connection((host, int(port)), TIMEOUT_S)) as attacker:
        sending = asyncio.create_task(asyncio.to_thread(attacker.sendall, flood))
        await asyncio.wait_for(asyncio.to_thread(read_frames, attacker, RESET, ended), TIMEOUT_S)
        await sending
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
            assert (await stub(channel).Predict(HELLO)).message == b"ok"
    await server.stop()


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_that_arrives_too_late_is_given_up(method):
    async with echoing(grace_s=0.01, timeout_s=0.02) as channel:
        call = begun(channel, method)
        assert await asyncio.wait_for(call.code(), TIMEOUT_S) is CODE.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", METHODS)
async def test_one_that_takes_its_time_is_answered(method):
    async with echoing(grace_s=0.01, most=1) as channel:
        call = begun(channel, method)
        await call.wait_for_connection()
        await call.write(b"late")
        await call.done_writing()
        answer = await (call.read() if method == "PredictStream" else call)
        assert answer == b"late"


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_a_request_is_refused(method):
    async with served(ScriptedEngine()) as channel:
        call = begun(channel, method)
        await call.done_writing()
        code, details = await code_of(call.read() if method == "PredictStream" else call)
    assert code is CODE.INVALID_ARGUMENT
    assert details == "the call has no request"
