"""Replies that follow a grammar, a schema or a choice of tools, on real models."""

import asyncio
import json
import re

import grpc
import pytest
from serving import chat, code_of, served, stream, user

from backend.demo import MODEL_DIR, WEATHER_TOOL
from backend.formats.registry import TOOL_FORMATS
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "warm": {"type": "boolean"},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["city", "warm", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "note_add",
            "description": "Add a note.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "maxLength": 10},
                    "pri": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "clock_now", "parameters": {"type": "object", "properties": {}}},
    },
]
NOTE_ADD = {"type": "function", "function": {"name": "note_add"}}
NO_THINKING = {"enable_thinking": "false"}


def raw(prompt, **options):
    return pb.PredictOptions(Prompt=prompt, **{"Tokens": 300, "Temperature": 1.0, **options})


def has_the_schema(text):
    value = json.loads(text)
    assert list(value) == ["city", "warm", "days"]
    assert isinstance(value["city"], str)
    assert isinstance(value["warm"], bool)
    assert all(isinstance(day, int) for day in value["days"])
    return True


def is_call(call):
    arguments = json.loads(call["arguments"])
    if call["name"] == "clock_now":
        return arguments == {}
    assert isinstance(arguments["text"], str)
    return call["name"] == "note_add" and set(arguments) <= {"text", "pri"}


async def test_a_schema_is_followed_by_every_reply_alone_and_beside_others(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        requests = [
            raw("ba be", Grammar=json.dumps(SCHEMA), Seed=seed, Metadata=NO_THINKING, Tokens=100)
            for seed in range(1, 9)
        ]
        free = [raw("bo bu", Seed=seed, Tokens=20, IgnoreEOS=True) for seed in range(3)]
        alone = [await backend.stub.Predict(request) for request in requests[:2]]
        together = await asyncio.gather(*map(backend.stub.Predict, [*requests, *free]))
    whole = [reply.message for reply in together[:8] if reply.tokens < 100]
    assert len(whole) > 4
    assert all(map(has_the_schema, whole))
    assert [reply.message for reply in alone] == [reply.message for reply in together[:2]]
    assert all(reply.tokens == 20 for reply in together[8:])


async def test_a_grammar_is_followed_whatever_else_the_request_wants(shared, tiny_models):
    grammar = 'root ::= ("yes" | "no") (", " ("yes" | "no")){2}'
    async with shared(tiny_models("qwen3")) as backend:
        [think] = (await backend.stub.TokenizeString(pb.PredictOptions(Prompt="<think>"))).tokens
        no_thought = json.dumps({str(think): -100})
        for options in ({}, {"IgnoreEOS": True}, {"Logprobs": 2}, {"Penalty": 1.3}):
            request = raw("ba", Grammar=grammar, LogitBias=no_thought, **options)
            reply = await stream(backend.stub, request)
            words = reply.content.split(", ")
            assert len(words) == 3
            assert set(words) <= {"yes", "no"}


async def test_a_thought_comes_before_the_structure(shared, tiny_models):
    async with shared(tiny_models("qwen3")) as backend:
        [end] = (await backend.stub.TokenizeString(pb.PredictOptions(Prompt="</think>"))).tokens
        bias = json.dumps({str(end): 4})
        request = raw("ba <think>", Grammar='root ::= "yes" | "no"', LogitBias=bias, Seed=5)
        reply = await stream(backend.stub, request)
        assert reply.reasoning
        assert reply.content in ("yes", "no")


async def test_no_thought_comes_before_the_structure_when_thinking_is_off(shared):
    async with shared(MODEL_DIR) as backend:
        request = chat(
            [user("What is the weather in Quito?")],
            Grammar='root ::= "yes" | "no"',
            Metadata=NO_THINKING,
            Tokens=40,
            Temperature=0.0,
        )
        reply = await stream(backend.stub, request)
        assert reply.content in ("yes", "no")
        assert not reply.reasoning


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_no_penalty_or_bias_leads_out_of_a_grammar(shared, tiny_models, temperature):
    async with shared(tiny_models("llama")) as backend:
        for odd in (
            {"Penalty": 1e-45},
            {"LogitBias": '{"1": 3.4e38}', "FrequencyPenalty": -3.4e38},
        ):
            request = raw("ba", Grammar='root ::= "yes" | "no"', Temperature=temperature, **odd)
            # A thought may come first, and take all tokens.
            assert (await stream(backend.stub, request)).content in ("yes", "no", "")


@pytest.mark.parametrize("grammar", ["", 'root ::= "\\"" [a-z]* "\\""'], ids=["alone", "hosts"])
async def test_a_schema_in_the_metadata_is_followed_too(shared, tiny_models, grammar):
    metadata = {"json_schema": json.dumps({"enum": ["red", "green"]})}
    async with shared(tiny_models("llama")) as backend:
        request = raw("ba", Metadata=metadata, Grammar=grammar, Seed=1)
        reply = await stream(backend.stub, request)
        assert json.loads(reply.content) in ("red", "green")


COLOR = {"enum": ["red", "green"]}


async def test_a_schema_as_published_has_words_of_its_own(shared, tiny_models):
    own = {"version": 2, "oneOf": [{"$ref": "#/colors/any"}, {"$ref": "#/colors/red"}]}
    schema = {**own, "colors": {"any": COLOR, "red": {"const": "red", "note": ""}}}
    async with shared(tiny_models("llama")) as backend:
        request = raw("ba", Metadata={"json_schema": json.dumps(schema)}, Seed=1)
        assert json.loads((await stream(backend.stub, request)).content) in ("red", "green")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": COLOR}},
        {"type": "json_schema", "json_schema": {"name": "c", "description": "d", "schema": COLOR}},
        {"type": "json_schema", "name": "c", "schema": COLOR},
        {"type": "json_object", "schema": COLOR},
        {"name": "c", "strict": False, "schema": COLOR},
    ],
)
async def test_a_response_format_means_its_schema(shared, tiny_models, response_format):
    text = json.dumps(response_format)
    async with shared(tiny_models("llama")) as backend:
        for rule in ({"Grammar": text}, {"Metadata": {"json_schema": text}}):
            reply = await stream(backend.stub, raw("ba", Seed=1, **rule))
            assert json.loads(reply.content) in ("red", "green")


async def test_a_response_format_without_a_schema_means_an_object_or_nothing(shared):
    async with shared(MODEL_DIR) as backend:

        def answer(rule):
            return chat([user("What is 7 times 8?")], Tokens=60, Grammar=rule, Metadata=NO_THINKING)

        ruled = await stream(backend.stub, answer('{"type": "json_object"}'))
        free = await stream(backend.stub, answer('{"type": "text"}'))
        assert ruled.content.startswith("{")
        assert free.said == (await stream(backend.stub, answer(""))).said


@pytest.mark.parametrize("schema", ["{}", "true", '{"type": "object"}', '{"type": "array"}'])
async def test_a_schema_of_any_value_gives_json_without_endless_numbers(shared, schema):
    async with shared(MODEL_DIR) as backend:
        for seed in range(4):
            request = chat(
                [user("What is 7 times 8?")],
                Tokens=120,
                Temperature=1.0,
                Seed=seed,
                Grammar=schema,
                Metadata=NO_THINKING,
            )
            reply = await stream(backend.stub, request)
            outside_strings = re.sub(r'"([^"\\]|\\.)*"?', "", reply.content)
            assert re.search(r"\d{20}", outside_strings) is None
            if reply.last.tokens < 120:
                json.loads(reply.content)


async def test_numbers_of_a_schema_end_and_are_finite(shared):
    schema = {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 1}
    async with shared(MODEL_DIR) as backend:
        for seed in range(5):
            metadata = {"json_schema": json.dumps(schema), "enable_thinking": "false"}
            asked = chat([user("1 / 3?")], Metadata=metadata, Temperature=2.0, Seed=seed)
            asked.LogitBias = json.dumps(await digits_preferred(backend))
            reply = await stream(backend.stub, asked)
            [number] = json.loads(reply.content)
            assert abs(number) < float("inf")
            assert len(reply.content) < 100


async def digits_preferred(backend):
    """Return a bias with which a number without bounds would not end."""
    ids = await backend.stub.TokenizeString(pb.PredictOptions(Prompt="0123456789"))
    return dict.fromkeys(map(str, ids.tokens), 50.0)


async def test_a_schema_that_contradicts_itself_is_refused_by_its_place(shared):
    when = {"type": "string", "format": "date", "pattern": "^x$"}
    schema = {"type": "object", "properties": {"when": when}}
    async with shared(MODEL_DIR) as backend:
        asked = chat([user("When?")], Metadata={"json_schema": json.dumps(schema)})
        code, details = await code_of(backend.stub.Predict(asked))
    told = 'Metadata["json_schema"]: #/properties/when: no text meets its pattern'
    assert (code, details[: len(told)]) == (grpc.StatusCode.INVALID_ARGUMENT, told)


async def test_a_structure_cut_off_at_the_limit_ends_by_length(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        reply = await backend.stub.Predict(raw("ba", Grammar=json.dumps(SCHEMA), Tokens=5))
        assert reply.tokens == 5


@pytest.mark.parametrize(
    "choice", ["required", '{"type":"function","function":{"name":"note_add"}}']
)
async def test_a_required_call_is_made_and_is_valid(shared, tiny_models, choice):
    async with shared(tiny_models("qwen3")) as backend:
        requests = [
            chat(
                [user("ba be bi")],
                tools=TOOLS,
                ToolChoice=choice,
                Tokens=400,
                Temperature=1.0,
                Seed=seed,
                Metadata=NO_THINKING | {"parallel_tool_calls": "false"},
            )
            for seed in range(5)
        ]
        replies = await asyncio.gather(*(stream(backend.stub, request) for request in requests))
    whole = [reply for reply in replies if reply.last.tokens < 400]
    assert len(whole) > 2
    for reply in whole:
        assert not reply.content
        assert [is_call(call) for call in reply.calls.values()] == [True]
        if "note_add" in choice:
            assert reply.calls[0]["name"] == "note_add"


async def test_the_embedded_model_calls_where_it_would_chat(shared):
    async with shared(MODEL_DIR) as backend:
        ask = chat([user("Say hello to Paris.")], tools=[WEATHER_TOOL], Tokens=120)
        assert not (await stream(backend.stub, ask)).calls
        ask.ToolChoice = "required"
        reply = await stream(backend.stub, ask)
        assert reply.calls[0]["name"] == "get_weather"
        assert isinstance(json.loads(reply.calls[0]["arguments"])["city"], str)
        assert not reply.content


@pytest.mark.smoke
async def test_the_embedded_model_gives_json_where_it_would_write_prose(shared):
    greeting = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"greeting": greeting}, "required": ["greeting"]}
    schema["additionalProperties"] = False
    async with shared(MODEL_DIR) as backend:
        ask = chat([user("Say hello to Paris.")], Tokens=120, Grammar=json.dumps(schema))
        reply = await stream(backend.stub, ask)
        assert isinstance(json.loads(reply.content)["greeting"], str)


async def test_a_lazy_grammar_holds_from_its_trigger_on(tiny_models):
    triggers = [pb.GrammarTrigger(word="<tool_call>")]
    grammar = 'root ::= "<tool_call>" ("yes" | "no")'
    async with served(tiny_models("qwen3"), GrammarTriggers=triggers) as backend:
        free = await backend.stub.Predict(raw("ba", Grammar=grammar, Tokens=30, Temperature=0.0))
        ids = (await backend.stub.TokenizeString(pb.PredictOptions(Prompt="<tool_call>"))).tokens
        bias = json.dumps({str(ids[0]): 100})
        called = await backend.stub.Predict(raw("ba", Grammar=grammar, LogitBias=bias))
    assert free.tokens > 5
    assert called.message.decode().removeprefix("<tool_call>") in ("yes", "no")


async def test_a_call_of_the_models_own_choice_is_valid_unless_that_is_switched_off(tiny_models):
    for options, always_valid in (([], True), (["constrain_calls:false"], False)):
        async with served(tiny_models("qwen3"), Options=options) as backend:
            ids = (
                await backend.stub.TokenizeString(pb.PredictOptions(Prompt="<tool_call>"))
            ).tokens
            requests = [
                chat(
                    [user("ba be bi")],
                    tools=TOOLS,
                    Tokens=100,
                    Temperature=1.0,
                    Seed=seed,
                    LogitBias=json.dumps({str(ids[0]): 9}),
                    Metadata=NO_THINKING | {"parallel_tool_calls": "false"},
                )
                for seed in range(1, 5)
            ]
            streams = (stream(backend.stub, request) for request in requests)
            replies = await asyncio.gather(*streams)
        calls = [call for r in replies if r.last.tokens < 100 for call in r.calls.values()]
        assert bool(calls) == always_valid
        assert all(map(is_call, calls))


async def with_one_call(stub, choices, **fields):
    """Ask for one call by each of some choices, all at once, with the seeds from 1 on."""
    requests = [
        chat(
            [user("ba be bi")],
            ToolChoice=choice,
            Temperature=1.0,
            Seed=seed,
            Metadata={"parallel_tool_calls": "false"},
            **fields,
        )
        for seed, choice in enumerate(choices, 1)
    ]
    return await asyncio.gather(*(stream(stub, request) for request in requests))


@pytest.mark.parametrize("name", [tools.name for tools in TOOL_FORMATS if tools.frames])
@pytest.mark.one_in(9)
async def test_required_calls_are_valid_in_every_format(tiny_models, name):
    """Five at once; the markers of most formats are spelled out, for no tiny model has them."""
    # The frames of these belong to their thoughts.
    reasoning = name if name in {"kimi_k3", "inkling"} else "none"
    options = [f"tool_parser!:{name}", f"reasoning_parser:{reasoning}"]
    async with served(tiny_models("qwen3"), Options=options) as backend:
        choices = [json.dumps(NOTE_ADD) if seed % 2 == 0 else "required" for seed in range(1, 6)]
        replies = await with_one_call(backend.stub, choices, tools=TOOLS, Tokens=400)
    whole = [(seed, r) for seed, r in enumerate(replies, 1) if r.last.tokens < 400]
    assert len(whole) > 3
    for seed, reply in whole:
        assert not reply.content.strip()
        [call] = reply.calls.values()
        assert is_call(call)
        assert seed % 2 or call["name"] == "note_add"


@pytest.mark.parametrize(
    ("parser", "beginning"),
    [
        pytest.param("json_list", "<tool_calls>\n{", id="MiniMax M1"),
        pytest.param("llama3_json", "<function=", id="Functionary 3.1"),
        pytest.param("phi4", "functools[", id="Firefunction"),
    ],
)
async def test_a_call_may_have_the_layout_of_a_neighbour_of_its_format(
    tiny_models, parser, beginning
):
    options = [f"tool_parser!:{parser}", "reasoning_parser:none"]
    async with served(tiny_models("qwen3"), Options=options) as backend:
        choices = ["required"] * 12
        replies = await with_one_call(backend.stub, choices, tools=TOOLS, Tokens=200, Logprobs=1)
    written = [
        "".join(
            entry["token"]
            for each in reply.replies
            if each.logprobs
            for entry in json.loads(each.logprobs)["content"]
        )
        for reply in replies
    ]
    found = [r for r, text in zip(replies, written, strict=True) if text.startswith(beginning)]
    whole = [reply for reply in found if reply.last.tokens < 200]
    assert whole, written
    for reply in whole:
        [call] = reply.calls.values()
        assert is_call(call)
        assert not reply.content.strip()


@pytest.mark.parametrize("parser", ["hermes_json", "qwen3_coder_xml", "gemma4"])
async def test_an_argument_is_not_lost_because_of_its_place_in_the_schema(tiny_models, parser):
    """A host may have sorted the names: `limit` before `path`, which models write first."""
    names = {"column": {"enum": [3, 4]}, "line": {"enum": [1, 2]}}
    place = {"type": "object", "properties": names, "required": ["column", "line"]}
    parameters = {
        "type": "object",
        "properties": {"limit": {"enum": [1, 2]}, "path": {"$ref": "#/$defs/place"}},
        "required": ["limit", "path"],
        "$defs": {"place": place},
    }
    tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}]
    options = [f"tool_parser!:{parser}", "reasoning_parser:none"]
    async with served(tiny_models("qwen3"), Options=options) as backend:
        replies = await with_one_call(backend.stub, ["required"] * 32, tools=tools, Tokens=200)
    whole = [call for reply in replies if reply.last.tokens < 200 for call in reply.calls.values()]
    assert len(whole) > 6
    written = [json.loads(call["arguments"]) for call in whole]
    assert {tuple(each) for each in written} == {("path", "limit"), ("limit", "path")}
    assert {tuple(each["path"]) for each in written} == {("column", "line"), ("line", "column")}
