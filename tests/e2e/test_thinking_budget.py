"""A thinking budget through the socket: the thought ends in time, and the answer follows."""

import asyncio
import json

import grpc
import pytest
from serving import chat, code_of, goes_on_after_a_loss, served, stream, user

from backend.demo import MODEL_DIR, WEATHER_TOOL
from backend.formats.registry import REASONING_FORMATS
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

START, END = "<think>", "</think>"
SCHEMA = {
    "type": "object",
    "properties": {"warm": {"type": "boolean"}},
    "required": ["warm"],
    "additionalProperties": False,
}
# It opens the thought, and knows no switch.
OPENING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n<think>\n"
)


def asked(budget, question="What is the weather in Oslo?", metadata=None, **options):
    wishes = {"thinking_budget": str(budget)} if budget is not None else {}
    fields = {"Tokens": 120, "Logprobs": 1, **options}
    return chat([user(question)], Metadata={**wishes, **(metadata or {})}, **fields)


def tokens_of(reply):
    return [entry["token"] for entry in json.loads(reply.last.logprobs)["content"]]


def thought_in(reply, *, is_open=False):
    """Return how many tokens a reply has between the marks of its thought."""
    tokens = tokens_of(reply)
    start = 0 if is_open else tokens.index(START) + 1
    return tokens.index(END) - start


@pytest.mark.parametrize("budget", [1, 4])
async def test_a_thought_ends_and_the_answer_follows(shared, budget):
    async with shared(MODEL_DIR) as backend:
        free = await stream(backend.stub, asked(None))
        reply = await stream(backend.stub, asked(budget))
        called = await stream(backend.stub, asked(budget, tools=[WEATHER_TOOL]))
    assert thought_in(free) > budget
    assert thought_in(reply) == thought_in(called) == budget
    assert free.reasoning.startswith(reply.reasoning)
    assert reply.content == free.content == "I cannot look up the weather without a tool."
    assert reply.last.tokens == len(tokens_of(reply))
    assert [call["arguments"] for call in called.calls.values()] == ['{"city": "Oslo"}']
    assert called.content == ""


async def test_a_budget_that_is_not_used_up_changes_nothing(shared):
    async with shared(MODEL_DIR) as backend:
        free, reply = [await stream(backend.stub, asked(budget)) for budget in (None, 1000)]
    assert tokens_of(reply) == tokens_of(free)


async def test_no_budget_is_no_thought(shared):
    async with shared(MODEL_DIR) as backend:
        replies = [
            await stream(backend.stub, asked(0)),
            await stream(backend.stub, asked(0, metadata={"enable_thinking": "true"})),
            await stream(backend.stub, asked(0, tools=[WEATHER_TOOL])),
        ]
        unary = await backend.stub.Predict(asked(0))
    assert all(reply.reasoning == "" and START not in tokens_of(reply) for reply in replies)
    assert replies[0].content == "I cannot look up the weather without a tool."
    assert unary.message.decode() == replies[0].content
    assert replies[2].calls[0]["name"] == "get_weather"


@pytest.mark.parametrize("budget", [0, 4])
async def test_a_thought_that_the_template_opened_is_closed(shared, budget):
    async with shared(MODEL_DIR, Options=[f"chat_template:{OPENING}"]) as backend:
        reply = await stream(backend.stub, asked(budget))
    assert thought_in(reply, is_open=True) == budget
    assert bool(reply.reasoning) is bool(budget)
    assert reply.content


@pytest.mark.parametrize("sampling", [{}, {"Temperature": 1.5, "Seed": 5}], ids=["greedy", "drawn"])
async def test_the_answer_follows_its_schema_or_is_a_call(shared, sampling):
    async with shared(MODEL_DIR) as backend:
        for budget in (0, 5):
            metadata = {"json_schema": json.dumps(SCHEMA)}
            reply = await stream(backend.stub, asked(budget, metadata=metadata, **sampling))
            assert list(json.loads(reply.content)) == ["warm"]
            assert budget or not reply.reasoning
            demanded = {"tools": [WEATHER_TOOL], "ToolChoice": "required"}
            called = await stream(backend.stub, asked(budget, **demanded, **sampling))
            assert list(json.loads(called.calls[0]["arguments"])) == ["city"]
            for each in (reply, called):
                if START in tokens_of(each):
                    assert 0 < thought_in(each) <= budget


async def test_eight_at_once_and_neighbours_say_what_each_says_alone(shared):
    requests = [
        asked(budget, f"Is it warm in {city}?", Temperature=0.8, Seed=seed, tools=tools)
        for seed, (budget, city, tools) in enumerate(
            [
                *((budget, "Rome", ()) for budget in (0, 1, 3, 6)),
                *((budget, "Oslo", [WEATHER_TOOL]) for budget in (0, 2, 4, 8)),
                *((None, city, ()) for city in ("Rome", "Oslo")),
            ],
            start=1,
        )
    ]
    async with shared(MODEL_DIR) as backend:
        alone = [tokens_of(await stream(backend.stub, request)) for request in requests]
        together = await asyncio.gather(*(stream(backend.stub, request) for request in requests))
    assert [tokens_of(reply) for reply in together] == alone


def place_of_end(reply, end):
    """Return how many tokens a reply has before the end of its thought."""
    read = b""
    pieces = [bytes(entry["bytes"]) for entry in json.loads(reply.last.logprobs)["content"]]
    before = b"".join(pieces).index(end.encode())
    for count, piece in enumerate(pieces):
        if len(read) >= before:
            return count
        read += piece
    return len(pieces)


# The tiny model's replies end with this token.
BUDGETED = [f for f in REASONING_FORMATS if f.starts and "<|im_end|>" not in f.end]


@pytest.mark.parametrize("thoughts", BUDGETED, ids=lambda f: f.name)
@pytest.mark.one_in(6)
async def test_it_holds_in_every_format_eight_at_once_beside_neighbours(tiny_models, thoughts):
    """The marks of most formats are spelled out, for no tiny model has them as tokens."""
    owns = {"harmony": "harmony", "muse": "muse_spark"}
    options = [
        f"reasoning_parser:{thoughts.name}",
        f"tool_parser!:{owns.get(thoughts.name, 'none')}",
    ]
    grammar = 'root ::= "yes" | "no"'
    budgets = [0, 1, 2, 5, 9, 13, 21, 34]
    opened = {
        "Prompt": f"ba be {thoughts.start}",
        "Tokens": 72,
        "Temperature": 1.0,
        "Logprobs": 1,
        "IgnoreEOS": True,
    }
    requests = [
        pb.PredictOptions(
            **opened,
            Seed=seed,
            Grammar=grammar if seed % 2 else "",
            Metadata={"thinking_budget": str(budget)},
        )
        for seed, budget in enumerate(budgets, start=1)
    ]
    free = [pb.PredictOptions(**{**opened, "Tokens": 60}, Seed=seed) for seed in (21, 22)]
    async with served(tiny_models("qwen3"), Options=options) as backend:
        alone = [(await stream(backend.stub, request)).message for request in free]
        streams = (stream(backend.stub, request) for request in [*requests, *free])
        *replies, one, other = await asyncio.gather(*streams)
    assert [one.message, other.message] == alone
    taken = [place_of_end(reply, thoughts.end) for reply in replies]
    assert all(count <= budget for count, budget in zip(taken, budgets, strict=True))
    assert sum(count == budget for count, budget in zip(taken, budgets, strict=True)) >= 5
    assert all(reply.content in ("yes", "no") for reply in replies[::2])


async def test_drafts_change_nothing(shared):
    async with shared(MODEL_DIR) as backend:
        for budget in (1, 7):
            plain = await stream(backend.stub, asked(budget, metadata={"speculation": "off"}))
            assert tokens_of(await stream(backend.stub, asked(budget))) == tokens_of(plain)


async def test_the_first_byte_after_a_thought_is_the_schemas_with_drafts_and_without(shared):
    async with shared(MODEL_DIR) as backend:
        for seed in range(1, 5):
            drawn = {"Temperature": 1.5, "Seed": seed}
            metadata = {"json_schema": json.dumps(SCHEMA)}
            drafted = await stream(backend.stub, asked(6, metadata=metadata, **drawn))
            off = metadata | {"speculation": "off"}
            plain = await stream(backend.stub, asked(6, metadata=off, **drawn))
            assert tokens_of(drafted) == tokens_of(plain)
            assert drafted.content.startswith("{")
            assert list(json.loads(drafted.content)) == ["warm"]


async def test_a_reply_that_must_not_end_by_itself_does_not(shared):
    async with shared(MODEL_DIR) as backend:
        reply = await stream(backend.stub, asked(3, IgnoreEOS=True, Tokens=60))
    assert reply.last.tokens == 60
    assert thought_in(reply) == 3


async def test_the_count_goes_on_in_another_engine_process():
    async with served(MODEL_DIR, Options=[f"chat_template:{OPENING}"]) as backend:
        (end,) = (await backend.stub.TokenizeString(pb.PredictOptions(Prompt=END))).tokens
        # Of itself the thought never ends.
        bias = json.dumps({end: -100})
        request = asked(90, Temperature=1.0, Seed=3, Tokens=120, IgnoreEOS=True, LogitBias=bias)
        alone = await stream(backend.stub, request)
        folded = await goes_on_after_a_loss(backend, request)
    assert tokens_of(folded) == tokens_of(alone)
    assert thought_in(folded, is_open=True) == 90


async def test_the_option_holds_for_requests_that_bring_none():
    async with served(MODEL_DIR, Options=["thinking_budget:2"]) as backend:
        assert thought_in(await stream(backend.stub, asked(None))) == 2
        assert thought_in(await stream(backend.stub, asked(4))) == 4


@pytest.mark.parametrize("budget", ["-1", "many", "1.5", "1e3", "10000000000", "٣"])
async def test_a_budget_that_is_no_number_of_tokens_is_refused(shared, budget):
    async with shared(MODEL_DIR) as backend:
        code, details = await code_of(backend.stub.Predict(asked(budget)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith('Metadata["thinking_budget"]: must be a number of tokens')


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("reasoning_parser:none", "thinking_budget is ignored: no format of thoughts is known"),
        (f"eos_token:{END}", "thinking_budget is ignored: '</think>' cannot be written, or ends"),
    ],
)
async def test_the_log_says_where_a_budget_cannot_be_kept(option, told, caplog):
    caplog.set_level("INFO")
    async with served(MODEL_DIR, Options=[option]) as backend:
        assert (await stream(backend.stub, asked(2))).last.tokens > 4
    assert told in caplog.text
