import json

import pytest

from backend.core.prompt import Tool, ToolChoice, ToolMode
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.tool_fields import tool_choice, tool_use, tools

WEATHER = {"name": "get_weather", "description": "", "parameters": {"type": "object"}}
OFFERED = (Tool(name="get_weather", schema={"type": "function", "function": WEATHER}),)


@pytest.mark.parametrize("text", ["", "  ", "null", "[]"])
def test_no_tools_are_no_tools(text):
    assert tools(text) == ()


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "function", "function": WEATHER},
        WEATHER,
        {"type": "function", **WEATHER},
    ],
)
def test_a_tool_is_a_function_with_or_without_its_wrapper(entry):
    assert tools(json.dumps([entry])) == OFFERED


def test_parameters_may_be_null():
    (tool,) = tools('[{"type": "function", "function": {"name": "f", "parameters": null}}]')
    assert tool.name == "f"


def function(**fields):
    return {"type": "function", "function": fields}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Tools: is not valid JSON"),
        ('{"a": 1}', "Tools: must be a JSON array, not an object"),
        ("[1]", "Tools[0]: must be a JSON object, not a number"),
        ("[{}]", "Tools[0].function: must be a JSON object, not null"),
        ([function()], "Tools[0].function.name: must be text, not null"),
        ([function(name=" ")], "Tools[0].function.name: must not be empty"),
        (
            [WEATHER, function(name="get_weather")],
            "Tools[1]: 'get_weather' is offered twice, with other words",
        ),
        (
            [function(name="f", parameters="x")],
            "Tools[0].function.parameters: must be a JSON object, not a string",
        ),
        ([{"type": "web_search", "name": "x", "function": {}}], "Tools[0].type: 'web_search'"),
        ("[" * 100_000, "Tools: is nested more than 128 deep"),
        (r'[{"name": "\ud83d"}]', "Tools: has an escape of half a surrogate pair"),
    ],
)
def test_malformed_tools_are_refused_by_the_place(text, message):
    with pytest.raises(InvalidRequestError) as caught:
        tools(text if isinstance(text, str) else json.dumps(text))
    assert str(caught.value).startswith(message)


NAMED = ToolChoice(ToolMode.NAMED, "get_weather")
SPELLINGS = [
    ("", ToolChoice(ToolMode.AUTO)),
    ("null", ToolChoice(ToolMode.AUTO)),
    ("auto", ToolChoice(ToolMode.AUTO)),
    ("none", ToolChoice(ToolMode.NONE)),
    ("required", ToolChoice(ToolMode.REQUIRED)),
    ('"auto"', ToolChoice(ToolMode.AUTO)),
    ('"none"', ToolChoice(ToolMode.NONE)),
    (json.dumps(json.dumps("required")), ToolChoice(ToolMode.REQUIRED)),
    ('{"type": "auto"}', ToolChoice(ToolMode.AUTO)),
    ('{"type": "any"}', ToolChoice(ToolMode.REQUIRED)),
    ('{"type": "none"}', ToolChoice(ToolMode.NONE)),
    ('{"type": "tool", "name": "get_weather"}', NAMED),
    ('{"type": "function", "name": "get_weather"}', NAMED),
    ('{"type": "function", "function": {"name": "get_weather"}}', NAMED),
    (json.dumps('{"type": "function", "function": {"name": "get_weather"}}'), NAMED),
]


@pytest.mark.parametrize(("text", "choice"), SPELLINGS)
def test_every_spelling_of_a_choice_is_understood(text, choice):
    assert tool_choice(text, OFFERED) == choice


@pytest.mark.parametrize(
    ("text", "offered", "message"),
    [
        ("sometimes", OFFERED, "ToolChoice: is not valid JSON"),
        ('"sometimes"', OFFERED, "ToolChoice: is not valid JSON"),
        ("3", OFFERED, "ToolChoice: must be a word or an object, not a number"),
        ("[]", OFFERED, "ToolChoice: must be a word or an object, not an array"),
        ('{"type": ["auto"]}', OFFERED, "ToolChoice.type: ['auto'] is not a kind of choice"),
        ('{"type": "function"}', OFFERED, "ToolChoice.name: must be text, not null"),
        ('{"type": "tool", "name": "fly"}', OFFERED, "ToolChoice: names 'fly', which is not in"),
        ("required", (), "ToolChoice: wants a tool call, but Tools is empty"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(text, offered, message):
    with pytest.raises(InvalidRequestError) as caught:
        tool_choice(text, offered)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["auto", "none", ""])
def test_a_choice_that_forces_nothing_needs_no_tools(text):
    tool_choice(text, ())


def test_the_same_tool_offered_twice_is_one_tool():
    assert tools(json.dumps([WEATHER, {"type": "function", "function": WEATHER}])) == OFFERED


CLOCK = {"name": "clock", "parameters": {}}


def use(choice):
    request = pb.PredictOptions(Tools=json.dumps([WEATHER, CLOCK]), ToolChoice=json.dumps(choice))
    return tool_use(request)


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", ToolMode.AUTO), ("required", ToolMode.REQUIRED)]
)
def test_allowed_tools_are_the_only_ones_offered(is_flat, mode, expected):
    subset = {"mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    shape = subset if is_flat else {"allowed_tools": subset}
    found = use({"type": "allowed_tools", **shape})
    assert [tool.name for tool in found.tools] == ["clock"]
    assert found.choice == ToolChoice(expected)


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ({}, "ToolChoice.allowed_tools.tools: must be a JSON array, not null"),
        ({"tools": [3]}, "ToolChoice.allowed_tools.tools[0]: must be a JSON object"),
        (
            {"tools": [{"function": {"name": "fly"}}]},
            "ToolChoice.allowed_tools.tools: names 'fly', which is not in Tools",
        ),
        ({"tools": [], "mode": "often"}, "ToolChoice.allowed_tools.mode: 'often' is not one of"),
        ({"tools": [], "mode": ["auto"]}, "ToolChoice.allowed_tools.mode: ['auto'] is not one of"),
        ({"tools": [], "mode": "required"}, "ToolChoice: wants a tool call, but Tools is empty"),
    ],
)
def test_malformed_allowed_tools_are_refused_by_the_place(subset, message):
    with pytest.raises(InvalidRequestError) as caught:
        use({"type": "allowed_tools", "allowed_tools": subset})
    assert str(caught.value).startswith(message)
