"""Bad input over the socket: its status, a text that names the field, and nobody else disturbed."""

import asyncio
import json

import grpc
import pytest
from serving import chat, code_of, served, stream, user

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

TOOL = {"type": "function", "function": {"name": "clock_now", "parameters": {"type": "object"}}}
NAN, INFINITY = float("nan"), float("inf")


def raw(**options) -> pb.PredictOptions:
    return pb.PredictOptions(**{"Prompt": "ba be bi", "Tokens": 4, **options})


BAD_REQUESTS = {
    "Temperature": [raw(Temperature=NAN), raw(Temperature=-1.0), raw(Temperature=INFINITY)],
    "TopP": [raw(TopP=-0.5), raw(TopP=1.5), raw(TopP=NAN)],
    "TopK": [raw(TopK=-2)],
    "MinP": [raw(MinP=-0.1), raw(MinP=2.0)],
    "Penalty": [raw(Penalty=-1.0), raw(Penalty=NAN)],
    "PresencePenalty": [raw(PresencePenalty=NAN)],
    "FrequencyPenalty": [raw(FrequencyPenalty=INFINITY)],
    "LogitBias": [
        raw(LogitBias="{"),
        raw(LogitBias="[1]"),
        raw(LogitBias='{"x": 1}'),
        raw(LogitBias='{"1": "y"}'),
        raw(LogitBias='{"1": NaN}'),
        raw(LogitBias='{"-1": 1}'),
        raw(LogitBias='{"100000": 1}'),
    ],
    "TopLogprobs": [raw(TopLogprobs=1000, Logprobs=1)],
    "Tools": [
        chat([user("ba")], tools=[{}]),
        chat([user("ba")], tools=[{"type": "function", "function": {}}]),
        pb.PredictOptions(UseTokenizerTemplate=True, Messages=[pb.Message(role="user")], Tools="{"),
    ],
    "ToolChoice": [
        chat([user("ba")], tools=[TOOL], ToolChoice="{"),
        chat([user("ba")], tools=[TOOL], ToolChoice='"sometimes"'),
        chat(
            [user("ba")],
            tools=[TOOL],
            ToolChoice=json.dumps({"type": "function", "function": {"name": "nobody"}}),
        ),
    ],
    "Metadata": [
        chat([user("ba")], Metadata={"enable_thinking": "perhaps"}),
        chat([user("ba")], Metadata={"chat_template_kwargs": "{"}),
        chat([user("ba")], Metadata={"chat_template_kwargs": "[]"}),
    ],
    "Messages": [
        chat([{"role": "wizard", "content": "ba"}]),
        chat([{"role": "", "content": "ba"}]),
        chat([{"role": "assistant", "tool_calls": "{"}]),
    ],
    "Prompt": [raw(Prompt=""), pb.PredictOptions(UseTokenizerTemplate=True)],
    "Images": [raw(Images=["iVBORw0KGgo="])],
}


@pytest.mark.parametrize("field", BAD_REQUESTS)
async def test_a_bad_field_is_named_and_disturbs_nobody(tiny_models, field):
    async with served(tiny_models("llama")) as backend:
        good = raw(Tokens=30, IgnoreEOS=True)
        expected = (await backend.stub.Predict(good)).message
        running = asyncio.create_task(stream(backend.stub, good))
        for request in BAD_REQUESTS[field]:
            code, details = await code_of(backend.stub.Predict(request))
            assert (code, field in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
            streamed = await code_of(stream(backend.stub, request))
            assert streamed == (code, details)
        assert (await running).message.encode() == expected


async def test_bytes_that_are_no_text_name_their_field(tiny_models):
    async with served(tiny_models("llama")) as backend:
        call = backend.channel.unary_unary("/backend.Backend/Predict")
        request = b"\x0a\x02\xff\xfe"  # field 1, Prompt, two bytes that are no UTF-8
        code, details = await code_of(call(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Prompt" in details
        code, _ = await code_of(call(b"\xff\xff\xff\xff"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('root ::= "yes', "line 1"),
        ('root ::= "a"\nthing ::= other', "line 2"),
        ("root ::= root", "Grammar"),
        ('{"type": "objekt"}', "objekt"),
        ('{"not": {"type": "string"}}', "not"),
        ('root ::= "' + "x" * 300_000 + '"', "256 KiB"),
        ('root ::= "a" root', "Grammar"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused(tiny_models, grammar, problem):
    async with served(tiny_models("llama")) as backend:
        neighbour = backend.stub.Predict(raw(Tokens=30, IgnoreEOS=True))
        code, details = await code_of(backend.stub.Predict(raw(Grammar=grammar)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Grammar" in details
        assert problem in details
        assert (await neighbour).tokens == 30


async def test_the_wrong_identity_is_refused_on_every_call_that_carries_one(tiny_models):
    async with served(tiny_models("llama")) as backend:
        other = {"ModelIdentity": "another"}
        calls = [
            backend.stub.Predict(raw(**other)),
            stream(backend.stub, raw(**other)),
            backend.stub.TokenizeString(raw(**other)),
            backend.stub.Embedding(raw(**other)),
            backend.stub.Rerank(pb.RerankRequest(query="q", **other)),
            backend.stub.Score(pb.ScoreRequest(prompt="p", **other)),
        ]
        for call in calls:
            code, details = await code_of(call)
            assert code is grpc.StatusCode.NOT_FOUND
            assert "model identity mismatch" in details
        right = str(tiny_models("llama"))
        assert (await backend.stub.Predict(raw(ModelIdentity=right))).tokens > 0


async def test_without_a_model_calls_fail_with_the_hosts_words():
    async with served() as backend:
        calls = [
            backend.stub.Predict(raw()),
            stream(backend.stub, raw()),
            backend.stub.TokenizeString(raw()),
            backend.stub.Detokenize(pb.DetokenizeRequest(tokens=[1])),
        ]
        for call in calls:
            code, details = await code_of(call)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "model not loaded" in details


async def test_what_a_model_cannot_do_is_unimplemented(tiny_models):
    async with served(tiny_models("llama")) as backend:
        calls = [
            backend.stub.Rerank(pb.RerankRequest(query="q", documents=["d"])),
            backend.channel.unary_unary("/backend.Backend/Sing")(b""),
        ]
        for call in calls:
            code, _ = await code_of(call)
            assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_template_without_tools_refuses_them(tiny_models, tmp_path):
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    options = [f"chat_template:{plain}"]
    async with served(tiny_models("llama"), Options=options) as backend:
        request = chat([user("ba")], tools=[TOOL], Tokens=3)
        code, details = await code_of(backend.stub.Predict(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Tools" in details
        hidden = chat([user("ba")], tools=[TOOL], Tokens=3, ToolChoice='"none"')
        assert (await backend.stub.Predict(hidden)).tokens == 3


async def test_a_template_that_refuses_gives_its_own_words(tiny_models, tmp_path):
    strict = tmp_path / "strict.jinja"
    strict.write_text("{{ raise_exception('only poems, please') }}")
    options = [f"chat_template:{strict}"]
    async with served(tiny_models("llama"), Options=options) as backend:
        code, details = await code_of(backend.stub.Predict(chat([user("ba")])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "only poems, please" in details
