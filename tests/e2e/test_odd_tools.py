"""Tools with odd schemas through the socket: no request is refused, the other tools stay held."""

import asyncio
import json
import re

import grpc
import pytest
from jsonschema import Draft202012Validator
from odd_schemas import ROOTS, UNFIT
from serving import chat, stream, user

from backend.demo import MODEL_DIR

pytestmark = pytest.mark.mlx

FORMATS = ("hermes_json", "qwen3_coder_xml", "gemma4")
QUESTION = user("What is the weather in Oslo?")
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
# The requests of public reports.
REPORTED = {
    "looking ahead": {"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}},
    "overlapping choices": {
        "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}
    },
    "any": {"properties": {"a": {"type": "any"}}},
    "a required name not declared": {"properties": {"a": {}}, "required": ["b"]},
    "a number for a type": {"properties": {"a": {"type": 5}}},
    "a number for a pattern": {"properties": {"a": {"type": "string", "pattern": 5}}},
    "a reference and a base": {
        "$defs": {
            "Base": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
            }
        },
        "allOf": [
            {"$ref": "#/$defs/Base"},
            {"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]},
        ],
    },
}


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}


def other(schema, name="other"):
    function = {"name": name, "description": "d", "parameters": schema}
    return {"type": "function", "function": function}


WEATHER_TOOL = other(CITY, "get_weather")


def served_in(shared, name):
    return shared(MODEL_DIR, Options=[f"tool_parser!:{name}"])


@pytest.mark.parametrize("name", FORMATS)
async def test_a_reported_schema_costs_no_request_anything(shared, name):
    async with served_in(shared, name) as backend:
        offers = [[WEATHER_TOOL, other(schema)] for schema in REPORTED.values()]
        free = [chat([QUESTION], tools=tools, Tokens=90) for tools in offers]
        named = [
            chat([QUESTION], tools=tools, Tokens=90, ToolChoice=json.dumps(WEATHER))
            for tools in offers
        ]
        calls = (stream(backend.stub, request) for request in (*free, *named))
        replies = await asyncio.gather(*calls)
    assert all(reply.last.tokens for reply in replies)
    for reply in replies[len(free) :]:
        [call] = reply.calls.values()
        assert call["name"] == "get_weather"
        assert isinstance(json.loads(call["arguments"])["city"], str)


async def test_odd_tools_can_be_offered_and_required_together(shared):
    roots = [schema for schema in ROOTS.values() if len(json.dumps(schema)) < 500]
    tools = [other(schema, f"odd{number}") for number, schema in enumerate(roots)]
    async with served_in(shared, "qwen3_coder_xml") as backend:
        for begin in range(0, len(tools), 10):
            offered = [WEATHER_TOOL, *tools[begin : begin + 10]]
            for choice in ("auto", "required"):
                request = chat([QUESTION], tools=offered, Tokens=3, ToolChoice=choice)
                assert (await stream(backend.stub, request)).last.tokens


async def test_a_list_whose_items_cannot_all_be_enforced_is_still_one_of_texts(shared):
    last = "[a-z0-9][a-z0-9-]{0,61}[a-z0-9]"
    labels = r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+"
    domain = {"type": "string", "pattern": f"^{labels}{last}$", "minLength": 1, "maxLength": 253}
    sites = {"type": "array", "items": domain, "minItems": 1, "maxItems": 1}
    schema = {"type": "object", "properties": {"sites": sites}, "required": ["sites"]}
    request = chat([QUESTION], tools=[other(schema)], Tokens=400, ToolChoice="required", Seed=1)
    async with served_in(shared, "qwen3_coder_xml") as backend:
        [call, *_] = (await stream(backend.stub, request)).calls.values()
    [site] = json.loads(call["arguments"])["sites"]
    assert re.fullmatch(domain["pattern"], site)


async def test_many_required_arguments_come_once_each_in_any_order(shared):
    names = [f"flag{number}" for number in range(9)]
    properties = {key: {"type": "boolean"} for key in names}
    schema = {"type": "object", "properties": properties, "required": names}
    for name in FORMATS:
        async with served_in(shared, name) as backend:
            requests = [
                chat(
                    [QUESTION],
                    tools=[other(schema)],
                    Tokens=400,
                    ToolChoice=json.dumps({"type": "function", "function": {"name": "other"}}),
                    Temperature=1.0,
                    Seed=seed,
                    Metadata={"enable_thinking": "false"},
                )
                for seed in range(1, 4)
            ]
            replies = await asyncio.gather(*(stream(backend.stub, each) for each in requests))
        orders = [
            json.loads(reply.calls[0]["arguments"], object_pairs_hook=list) for reply in replies
        ]
        assert all(sorted(name for name, _ in order) == names for order in orders)
        assert any([name for name, _ in order] != names for order in orders)


@pytest.mark.parametrize("name", FORMATS)
async def test_the_conditions_of_a_tool_hold_in_its_calls(shared, name):
    short, kinds = {"type": "string", "maxLength": 8}, ["city", "zone"]
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": kinds}, "city": short, "zone": short},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "city"}}},
        "then": {"required": ["city"], "properties": {"zone": False}},
        "else": {"required": ["zone"], "not": {"required": ["city"]}},
    }
    choice = json.dumps({"type": "function", "function": {"name": "other"}})
    async with served_in(shared, name) as backend:
        seen = set()
        for seed in range(4):
            request = chat([QUESTION], tools=[other(schema)], ToolChoice=choice, Seed=seed)
            request.Tokens, request.Temperature = 120, 1.5
            [call] = (await stream(backend.stub, request)).calls.values()
            arguments = json.loads(call["arguments"])
            Draft202012Validator(schema).validate(arguments)
            seen.add(arguments["kind"])
    assert seen <= {*kinds}


async def test_an_answer_follows_its_schema_beside_odd_tools(shared):
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer["additionalProperties"] = False
    odd = [other(schema, f"odd{number}") for number, schema in enumerate(REPORTED.values())]
    unfit = [other(schema, f"unfit{number}") for number, schema in enumerate(UNFIT.values())]
    async with served_in(shared, "qwen3_coder_xml") as backend:
        for tools in ([*odd, *unfit], unfit):
            request = chat(
                [QUESTION],
                tools=tools,
                Tokens=60,
                Grammar=json.dumps(answer),
                Metadata={"enable_thinking": "false"},
            )
            reply = await stream(backend.stub, request)
            assert reply.calls or json.loads(reply.content).keys() == {"ok"}


async def test_a_tool_that_cannot_be_called_is_refused_only_if_it_must_be(shared):
    odd = [other(schema, f"odd{number}") for number, schema in enumerate(UNFIT.values())]
    async with served_in(shared, "qwen3_coder_xml") as backend:
        assert (await stream(backend.stub, chat([QUESTION], tools=odd, Tokens=3))).last.tokens
        request = chat([QUESTION], tools=[*odd, WEATHER_TOOL], Tokens=90, ToolChoice="required")
        calls = (await stream(backend.stub, request)).calls.values()
        assert {call["name"] for call in calls} == {"get_weather"}
        only = json.dumps({"type": "function", "function": {"name": "odd0"}})
        for tools, choice in (([*odd, WEATHER_TOOL], only), (odd, "required")):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stream(backend.stub, chat([QUESTION], tools=tools, ToolChoice=choice))
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "tool 'odd0'" in refusal.value.details()
