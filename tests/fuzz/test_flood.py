"""Ten thousand malformed requests leave a process that answers, is idle, and holds no more."""

import asyncio
from itertools import cycle, islice

import grpc
import grpc.aio
import pytest
from real_process import TIMEOUT_S, real_backend
from serving import code_of

from backend.pb import backend_pb2 as pb

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(180)]

REQUESTS = 10_000
AT_ONCE = 200
WARM_UP = 2000
MAX_GROWTH_MB = 25.0
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


def test_ten_thousand_malformed_requests_leave_the_server_as_it_was(tiny_models, tmp_path):
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
