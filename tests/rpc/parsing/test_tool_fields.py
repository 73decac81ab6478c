import json

import pytest

from backend.core.prompt import Tool, ToolChoice, ToolMode
from backend.errors import InvalidRequestError
from backend.output.reply_format import warn_once
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.message_fields import offer, tool_use

WEATHER = {"name": "get_weather", "description": "", "parameters": {"type": "object"}}
OFFERED = (Tool(name="get_weather", schema={"type": "function", "function": WEATHER}),)
ONE = json.dumps([WEATHER])


def tool_choice(text, offered):
    return tool_use(pb.PredictOptions(Tools=offered, ToolChoice=text)).choice


def tools(text):
    return offer(text).tools


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


def function(**fields):
    return {"type": "function", "function": fields}


@pytest.mark.parametrize("value", [None, "x", 5, True, []])
def test_parameters_that_are_no_object_are_like_none(value):
    (tool,) = tools(json.dumps([function(name="f", description=None, parameters=value)]))
    assert tool == Tool(name="f", schema=function(name="f"))
    assert tool.parameters == {}


def test_what_a_tool_has_besides_stays_as_it_is():
    entry = {**function(strict=None, name="f", returns={"type": "string"}), "x": 1}
    (tool,) = tools(json.dumps([entry]))
    assert list(tool.schema["function"].items()) == list(entry["function"].items())
    assert tool.schema == entry


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "f", "description": "d", "input_schema": PARAMETERS},
        {
            "type": "custom",
            "name": "f",
            "description": "d",
            "input_schema": PARAMETERS,
            "cache_control": {"type": "ephemeral"},
        },
        {"name": "f", "description": "d", "inputSchema": PARAMETERS},
        {"type": "function", "function": None, "name": "f", "description": "d"}
        | {"parameters": PARAMETERS},
        {"type": None, "name": "f", "description": "d", "parameters": PARAMETERS},
    ],
    ids=["Anthropic", "Anthropic's custom", "MCP", "Responses", "bare"],
)
def test_a_function_comes_in_the_form_of_any_client(entry):
    wanted = function(name="f", description="d", parameters=PARAMETERS)
    assert tools(json.dumps([entry])) == (Tool(name="f", schema=wanted),)


OTHERS = {
    "web_search": {"type": "web_search"},
    "local_shell": {"type": "local_shell"},
    "mcp": {"type": "mcp", "server_label": "s", "server_url": "u"},
    "custom": {"type": "custom", "name": "patch", "format": {"type": "text"}},
    "custom, nested": {"type": "custom", "custom": {"name": "patch"}},
    "Anthropic's server tool": {"type": "web_search_20250305", "name": "web_search"},
    "builtin": {"type": "builtin_function", "function": {"name": "$web_search"}},
    "the host's form": function(name="", description="", parameters=None),
    "a name of null": function(name=None),
    "a blank name": function(name=" "),
    "no function": {"type": "function"},
    "a kind that is no text": {"type": 5, "name": "f"},
}


@pytest.mark.parametrize("entry", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("choice", ["", "auto", "none"])
def test_tools_of_other_kinds_are_skipped(entry, choice):
    for entries, left in (([entry], ()), ([entry, WEATHER, entry], OFFERED)):
        request = pb.PredictOptions(Tools=json.dumps(entries), ToolChoice=choice)
        assert tool_use(request).tools == left


def test_skipping_is_logged_once_for_each_kind_without_the_callers_words(caplog):
    warn_once.cache_clear()
    private = {"type": "my words", "name": "mine"}
    entries = json.dumps([*OTHERS.values(), private, private, {"type": "bash_20250124"}])
    tools(entries)
    tools(entries)
    logged = [record.getMessage() for record in caplog.records]
    kinds = ("web_search", "local_shell", "mcp", "custom", "builtin_function", "bash")
    expected = {f"a tool of the type {kind}" for kind in kinds}
    expected |= {"a tool of an unknown type", "a function without a name"}
    assert sorted(logged) == sorted(
        f"Tools: {what} is skipped: only functions can be called" for what in expected
    )


@pytest.mark.parametrize(
    ("entries", "choice", "message"),
    [
        (
            [{"type": "web_search"}],
            "required",
            'ToolChoice: wants a tool call, but Tools has only what is skipped: "web_search"',
        ),
        (
            [WEATHER, OTHERS["custom"]],
            '{"type": "custom", "name": "patch"}',
            "ToolChoice: names 'patch', which is of the type \"custom\": only functions",
        ),
        (
            [WEATHER, OTHERS["custom, nested"]],
            '{"type": "custom", "custom": {"name": "patch"}}',
            "ToolChoice: names 'patch', which is of the type \"custom\": only functions",
        ),
        (
            [WEATHER, OTHERS["Anthropic's server tool"]],
            '{"type": "tool", "name": "web_search"}',
            "ToolChoice: names 'web_search', which is of the type \"web_search_20250305\"",
        ),
        (
            [WEATHER, {"type": "web_search"}],
            '{"type": "web_search"}',
            "ToolChoice.type: 'web_search' is not a kind of choice: only functions can be called",
        ),
    ],
)
def test_a_skipped_tool_that_is_chosen_is_refused(entries, choice, message):
    with pytest.raises(InvalidRequestError) as caught:
        tool_use(pb.PredictOptions(Tools=json.dumps(entries), ToolChoice=choice))
    assert str(caught.value).startswith(message)


def test_a_required_call_is_one_of_the_functions_left():
    request = pb.PredictOptions(Tools=json.dumps([{"type": "x"}, WEATHER]), ToolChoice="required")
    assert tool_use(request).tools == OFFERED


def test_of_two_functions_with_one_name_the_last_counts():
    other = {"name": "get_weather", "description": "other"}
    offered = tools(json.dumps([WEATHER, CLOCK, other]))
    assert [tool.name for tool in offered] == ["get_weather", "clock"]
    assert offered[0].schema["function"] == other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Tools: is not valid JSON"),
        ('{"a": 1}', "Tools: must be a JSON array, not an object"),
        ("[1]", "Tools[0]: must be a JSON object, not a number"),
        ([function(name=5)], "Tools[0].function.name: must be text, not a number"),
        ([{"function": "f"}], "Tools[0].function: must be a JSON object, not a string"),
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
    ("{}", ToolChoice()),
    ('{"mode": "required"}', ToolChoice(ToolMode.REQUIRED)),
    ('{"type": "any"}', ToolChoice(ToolMode.REQUIRED)),
    ('{"type": "none"}', ToolChoice(ToolMode.NONE)),
    ('{"type": "tool", "name": "get_weather"}', NAMED),
    ('{"type": "function", "name": "get_weather"}', NAMED),
    ('{"type": "function", "function": {"name": "get_weather"}}', NAMED),
    (json.dumps('{"type": "function", "function": {"name": "get_weather"}}'), NAMED),
]


@pytest.mark.parametrize(("text", "choice"), SPELLINGS)
def test_every_spelling_of_a_choice_is_understood(text, choice):
    assert tool_choice(text, ONE) == choice


@pytest.mark.parametrize(
    ("text", "offered", "message"),
    [
        ("sometimes", ONE, "ToolChoice: 'sometimes' is not one of ['none', 'auto', 'required', "),
        ('"Auto"', ONE, "ToolChoice: 'Auto' is not one of ['none', 'auto', 'required', 'any']"),
        ("not one", ONE, "ToolChoice: is not valid JSON"),
        ("3", ONE, "ToolChoice: must be a word or an object, not a number"),
        ("[]", ONE, "ToolChoice: must be a word or an object, not an array"),
        ('{"type": ["auto"]}', ONE, "ToolChoice.type: ['auto'] is not a kind of choice"),
        ('{"type": "function"}', ONE, "ToolChoice.name: must be text, not null"),
        ('{"type": "tool", "name": "fly"}', ONE, "ToolChoice: names 'fly', which is not in"),
        ("required", "", "ToolChoice: wants a tool call, but Tools is empty"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(text, offered, message):
    with pytest.raises(InvalidRequestError) as caught:
        tool_choice(text, offered)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["auto", "none", ""])
def test_a_choice_that_forces_nothing_needs_no_tools(text):
    tool_choice(text, "")


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
