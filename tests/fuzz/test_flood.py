"""Floods of malformed requests and of headers leave a process that answers, and holds no more."""

import asyncio
import socket
import threading
from contextlib import closing
from itertools import cycle, islice

import grpc
import grpc.aio
import pytest
from http2 import PREFACE, REMEMBERED, RESET, field, opened, read_frames
from real_process import TIMEOUT_S, real_backend
from serving import code_of
from waiting import wait_until

from backend.pb import backend_pb2 as pb

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(180)]

REQUESTS = 5_000
AT_ONCE = 200
WARM_UP = 2000
MAX_GROWTH_MB = 15.0
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}


def predict(**fields):
    return "Predict", pb.PredictOptions(**{"Prompt": "ba", **fields}).SerializeToString()


def chat(**fields):
    message = pb.Message(role="user", content="ba")
    return predict(UseTokenizerTemplate=True, Messages=[message], **fields)


MALFORMED = [
    *(
        ("Predict", b"\xff" * 40),
        ("PredictStream", b"\x0a\x02\xff\xfe"),
        ("LoadModel", b"\x0a\xff"),
    ),
    *(("Score", b""), ("Rerank", b""), ("Embedding", b""), ("Sing", b""), ("Predict", b"")),
    ("Detokenize", pb.DetokenizeRequest(tokens=[2**31 - 1]).SerializeToString()),
    ("LoadModel", pb.ModelOptions(Model="x", DType="gold").SerializeToString()),
    ("LoadModel", pb.ModelOptions(Model="x", EngineArgs='{"no": 1}').SerializeToString()),
    predict(Temperature=float("nan")),
    predict(LogitBias='{"a": 1}'),
    predict(LogitBias="{"),
    predict(Grammar="root ::= other"),
    predict(Grammar='{"type": "gold"}'),
    predict(Prompt="ba " * 3000),
    predict(ModelIdentity="another"),
    predict(StopPrompts=map(str, range(65))),
    predict(Images=["/etc/passwd"]),
    predict(PromptCachePath="\0"),
    predict(CorrelationId="\n"),
    chat(Tools="[" * 5000),
    chat(Tools='[{"function": 3}]'),
    chat(ToolChoice="{"),
    chat(Metadata={"chat_template_kwargs": "[]"}),
]


async def refusal(channel, method, data):
    """Return the status of a request that has to be refused; it has to say why."""
    call = channel.unary_unary(f"/backend.Backend/{method}")(data, timeout=TIMEOUT_S)
    code, details = await code_of(call)
    assert details
    return code.name


async def flood(address, count):
    """Send requests, many at once, and return the statuses that came."""
    statuses = set()
    requests = islice(cycle(MALFORMED), count)
    async with grpc.aio.insecure_channel(address) as channel:
        while batch := list(islice(requests, AT_ONCE)):
            calls = [refusal(channel, method, data) for method, data in batch]
            statuses |= set(await asyncio.gather(*calls))
    return statuses


def test_five_thousand_malformed_requests_leave_the_server_as_it_was(tiny_models, tmp_path):
    with real_backend(tmp_path / "log") as backend:
        backend.load(tiny_models("llama"), MaxModelLen=1024)
        good = pb.PredictOptions(Prompt="ba be", Tokens=8)
        expected = backend.stub.Predict(good).message
        statuses = asyncio.run(flood(backend.process.address, WARM_UP))
        before = backend.resident_mb
        statuses |= asyncio.run(flood(backend.process.address, REQUESTS - WARM_UP))
        growth = backend.resident_mb - before
        assert backend.stub.Health(pb.HealthMessage()).message == b"OK"
        assert backend.stub.Predict(good).message == expected
        assert backend.is_idle()
    assert statuses == REFUSALS
    assert growth < MAX_GROWTH_MB


# A header of 4 kB, and calls that name it in a byte: gRPC reads 16 MB for 4 kB that are sent.
REMEMBERS = field(b"x-odd", b"a" * 3900, remembers=True)
REPEATED = 4000
CALLS, MOST_RESET = 2000, 1500
MAX_HEADERS_MB, MAX_LEFT_MB = 400.0, 50.0


def test_headers_that_stand_for_many_take_bounded_memory_for_a_while(tmp_path):
    path = "/backend.Backend/Predict"
    calls = [opened(number, path, REMEMBERED * REPEATED) for number in range(3, 2 * CALLS, 2)]
    flood = b"".join((PREFACE, opened(1, path, REMEMBERS), *calls))
    with real_backend(tmp_path / "log") as backend:
        backend.stub.Status(pb.HealthMessage(), timeout=TIMEOUT_S)
        before = backend.resident_mb
        host, port = backend.process.address.rsplit(":", 1)
        with closing(socket.create_connection((host, int(port)), TIMEOUT_S)) as attacker:
            sending = threading.Thread(target=attacker.sendall, args=(flood,))
            sending.start()
            read_frames(attacker, RESET, MOST_RESET)
            sending.join()
        assert backend.stub.Health(pb.HealthMessage(), timeout=TIMEOUT_S).message == b"OK"
        assert backend.peak_mb < before + MAX_HEADERS_MB
        wait_until(lambda: backend.resident_mb < before + MAX_LEFT_MB)
