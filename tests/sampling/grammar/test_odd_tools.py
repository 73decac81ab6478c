"""An odd schema costs its own part of its own tool: the other tools keep theirs."""

import json
import logging
from copy import deepcopy
from random import Random

import pytest
from golden import named_calls, named_format, play, tool_format
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_schemas import REQUIRED, ROOTS, SCHEMAS, UNFIT, around
from tool_replies import FORMATS, TOOLS, tool
from tool_walks import TinyVocabulary, is_whole, walk

from backend.errors import GrammarError
from backend.output.reply import ReplySpec
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.tool_calls import HeldTools
from backend.sampling.grammar.tool_parameters import CallRule, Parameters, PerSchema

AUTO = CallRule(most=4)
ONE_CALL = CallRule(least=1, most=1, has_text=False)
NOTES, CLOCK = TOOLS
# One of each dialect, and of each way to write its values.
DIALECTS = (
    *("hermes_json", "qwen3_coder_xml", "deepseek_dsml v4", "minicpm5", "minimax_m3"),
    *("gemma4", "pythonic"),
)
NAMED_IN_JSON = ("hermes_json", "cohere", "apertus")
NAMED = (
    *("glm4", "qwen3_coder_xml", "seed_oss", "minimax_m2", "minimax_m3", "hunyuan_v3", "kimi_k3"),
    *("deepseek_dsml v4", "minicpm5", "step3", "muse_spark", "k2_horizon", "solar_open2"),
    *("kimi_k2", "deepseek_v3", "deepseek_v31", "plamo3", "solar_open", "mirothinker"),
    *("functionary", "mistral", "gemma4", "pythonic", "olmo3", *NAMED_IN_JSON),
)
BATCH = 40


class Model:
    """The calls of a model in one format."""

    def __init__(self, name):
        self.family = FORMATS[name]
        self.vocabulary = TinyVocabulary(self.family.markers, (), self.family.ends)
        self.compiler = GrammarCompiler(self.vocabulary)
        known = PerSchema(Parameters.of)
        self.held = HeldTools(tool_format(self.family.parser or name), self.compiler, known)

    def grammar(self, tools, rule):
        offered = self.held.offered(tools)
        while True:
            try:
                found = self.compiler.compile(offered.grammar(rule))
            except GrammarError:
                if not offered.weaken():
                    raise
            else:
                offered.log_notes()
                return found

    def refusal(self, tools):
        """Return why no call of these tools can be required; nothing if one can."""
        try:
            self.grammar(tools, ONE_CALL)
        except GrammarError as error:
            return error.problem
        return ""

    def require_held(self, tools):
        """Require that a sound tool beside others can be called, with valid arguments only."""
        grammar = self.grammar(tools, AUTO)
        assert is_whole(grammar, self.family.one, self.vocabulary)
        for valid, invalid in (("note_add", "note_del"), ("text", "test"), ("2", "12")):
            wrong = self.family.one.replace(valid, invalid)
            assert not is_whole(grammar, wrong, self.vocabulary)


MODELS = {name: Model(name) for name in (*DIALECTS, "kimi_k3")}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.one_in(4)
def test_odd_tools_leave_the_sound_ones_whole(name):
    odd = [tool(f"odd{number}", schema) for number, schema in enumerate(SCHEMAS.values())]
    unfit = [tool(f"unfit{number}", schema) for number, schema in enumerate(UNFIT.values())]
    for begin in range(0, len(odd), BATCH):
        MODELS[name].require_held([*unfit, NOTES, *odd[begin : begin + BATCH]])


@pytest.mark.parametrize("name", ["hermes_json", "qwen3_coder_xml", "gemma4"])
def test_an_odd_tool_can_be_required(name):
    model = MODELS[name]
    for schema in [*REQUIRED, *ROOTS.values()]:
        grammar = model.grammar([tool("odd", schema)], ONE_CALL)
        assert not is_whole(grammar, model.family.none, model.vocabulary)


@pytest.mark.parametrize("name", ["hermes_json", "gemma4", "pythonic"])
def test_a_call_of_an_odd_tool_comes_to_an_end_and_is_read(name):
    model, random = MODELS[name], Random(name)
    for schema in [*REQUIRED, *ROOTS.values()]:
        offered = tool("odd", schema)
        grammar = model.grammar([offered], ONE_CALL)
        if (text := walk(grammar, model.vocabulary, random)) is None:
            continue
        spec = ReplySpec(
            format=named_format(name, "none"), tools={"odd": Parameters.of(offered).schema}
        )
        [(called, arguments)] = named_calls(play(spec, [text]))
        assert called == "odd"
        assert isinstance(json.loads(arguments), dict)


NAMES = (
    *("filter[status]", "fields[]", "$top", "@type", "x-foo", "a.b", "a b", "a:b", "a=b", "a,b"),
    *('a"b', "a<b", "a>b", "a&b", "a'b", "</a>", 'a">b'),
)


@pytest.mark.parametrize("name", [*DIALECTS, "kimi_k3"])
@pytest.mark.parametrize("odd", NAMES)
def test_arguments_with_odd_names_are_read_whole_and_letter_by_letter(name, odd):
    model = MODELS[name]
    number = {"type": "integer", "minimum": 1, "maximum": 9}
    part = {"type": "object", "properties": {odd: number}, "required": [odd]}
    properties = {odd: number, "part": part}
    schema = {"type": "object", "properties": properties, "required": [odd, "part"]}
    offered = tool("odd", schema)
    grammar = model.grammar([offered], ONE_CALL)
    texts = (walk(grammar, model.vocabulary, Random(seed)) for seed in range(9))
    text = next(filter(None, texts))
    spec = ReplySpec(
        format=named_format(model.family.parser or name, "none"), tools={"odd": schema}
    )
    for chunks in ([text], list(text)):
        [(_, arguments)] = named_calls(play(spec, chunks))
        read = json.loads(arguments)
        assert read.keys() == {odd, "part"}
        found = [read[odd], read["part"][odd]]
        assert all(isinstance(value, int) for value in found)


@pytest.mark.parametrize("name", DIALECTS)
def test_an_object_inside_itself_is_read_whole_and_letter_by_letter(name):
    model, number = MODELS[name], {"type": "integer", "minimum": 1, "maximum": 9}
    inner = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    schema = {
        "type": "object",
        "properties": {"v": number, "next": inner},
        "required": ["v", "next"],
    }
    grammar = model.grammar([tool("odd", schema)], ONE_CALL)
    texts = filter(None, (walk(grammar, model.vocabulary, Random(seed)) for seed in range(9)))
    spec = ReplySpec(
        format=named_format(model.family.parser or name, "none"), tools={"odd": schema}
    )
    depths = set()
    for text in texts:
        [(_, arguments)] = named_calls(play(spec, [text]))
        assert named_calls(play(spec, list(text))) == (("odd", arguments),)
        part, depth = json.loads(arguments), 0
        while part is not None:
            assert part.keys() == {"v", "next"}
            assert isinstance(part["v"], int)
            part, depth = part["next"], depth + 1
        depths.add(depth)
    assert max(depths) > 1


@pytest.mark.parametrize("name", NAMED)
def test_tools_with_odd_names_are_called_by_them_whole_and_letter_by_letter(name):
    model = Model(name)
    family = model.family
    for odd in (*NAMES, *(("a\\b", "a\nb", "é😀") if name in NAMED_IN_JSON else ())):
        grammar = model.grammar([tool(odd, {"type": "object"})], ONE_CALL)
        text = next(filter(None, (walk(grammar, model.vocabulary, Random(n)) for n in range(9))))
        spec = ReplySpec(
            format=named_format(family.parser or name, family.reasoning),
            tools={odd: {"type": "object"}},
        )
        for chunks in ([text], list(text)):
            assert [called for called, _ in named_calls(play(spec, chunks))] == [odd]


@pytest.mark.parametrize("name", ["qwen3_coder_xml", "gemma4", "pythonic"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "pattern": "^a$", "minLength": 3},
        {"type": "string", "format": "date", "maxLength": 3},
        {"type": "string", "pattern": r"^[^\s\S]+$"},
    ],
)
def test_conditions_that_no_text_meets_are_not_met_by_half_a_call(name, part):
    model = MODELS[name]
    [held] = model.held.offered([tool("odd", around(part, required=["a"]))]).held
    assert len(held.parameters.notes) == 1


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("part", [{"$ref": "#"}, {"$ref": "#/$defs/Endless"}])
def test_a_value_without_an_end_is_any_value(name, part):
    model = MODELS[name]
    [held] = model.held.offered([tool("odd", around(part, required=["a"]))]).held
    assert list(held.parameters.notes.values()) == ["has no end"]
    assert model.grammar([tool("odd", around(part, required=["a"]))], ONE_CALL)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("schema", UNFIT.values(), ids=UNFIT)
def test_a_tool_that_cannot_be_called_is_named(name, schema):
    with pytest.raises(GrammarError, match="tool 'odd': "):
        MODELS[name].grammar([tool("odd", schema)], ONE_CALL)
    assert MODELS[name].grammar([tool("odd", schema), CLOCK], ONE_CALL)


def test_one_line_tells_tool_place_and_keyword_once(caplog):
    model = Model("qwen3_coder_xml")
    schema = around({"type": "string", "pattern": "^(?!secret)", "minLength": "secret"})
    tools = [NOTES, tool("odd", schema)]
    with caplog.at_level(logging.INFO):
        for rule in (AUTO, ONE_CALL, AUTO):
            model.grammar(tools, rule)
    [line] = [record.getMessage() for record in caplog.records]
    assert "'odd'" in line
    assert "'#/properties/a/pattern'" in line
    assert "'#/properties/a/minLength'" in line
    assert "secret" not in line


def test_what_only_the_compiler_refuses_is_found_and_the_rest_of_the_tool_holds():
    model = MODELS["hermes_json"]
    schema = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"anyOf": [{"pattern": "(["}, {"type": "null"}]}},
            "number": {"type": "integer", "maximum": 9},
        },
        "required": ["number"],
    }
    tools = [tool("odd", schema)]
    grammar = model.grammar(tools, ONE_CALL)
    call = '<tool_call>\n{{"name": "odd", "arguments": {}}}\n</tool_call>'
    good = call.format('{"list": ["x", null], "number": 1}')
    assert is_whole(grammar, good, model.vocabulary)
    for arguments in ('{"list": [1], "number": 1}', '{"number": 12}', '{"list": []}'):
        assert not is_whole(grammar, call.format(arguments), model.vocabulary)


@pytest.mark.parametrize("wrap", ["{}", "[{}]"])
def test_conditions_that_no_text_meets_free_nothing_around_them(wrap):
    model = MODELS["hermes_json"]
    when = {"type": "string", "format": "date", "pattern": "^[0-9]{2}/[0-9]{2}$"}
    required = {"required": ["when", "n"], "additionalProperties": False}
    event = {"type": "object", "properties": {"when": when, "n": {"type": "integer"}}, **required}
    part = event if wrap == "{}" else {"type": "array", "items": event}
    grammar = model.grammar([tool("odd", around(part, required=["a"]))], ONE_CALL)
    for value, is_allowed in {'{"when": "01/02", "n": 1}': True, '"A"': False, "{}": False}.items():
        arguments = f'{{"a": {wrap.replace("{}", value)}}}'
        call = f'<tool_call>\n{{"name": "odd", "arguments": {arguments}}}\n</tool_call>'
        assert is_whole(grammar, call, model.vocabulary) == is_allowed


KINDS = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in ("a", "b")
]
# Choices, and whether no value can match two of them.
CHOICES = [
    ([{"type": "null"}, {"$ref": "#/$defs/a"}], True),
    ([{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/b"}]}], True),
    ([{"enum": ["x"]}, {"type": "integer"}, {"const": True}], True),
    ([{"const": 1}, {"const": True}], True),
    ([{"required": ["x"]}, {"required": ["y"]}], True),
    ([{"$ref": "#/$defs/a"}, {"type": "object", "required": ["x"]}], True),
    ([{"$ref": "#/$defs/a"}, {"required": ["kind", "x"]}], False),
    ([{"required": ["x"]}, {"type": ["object", "null"], "required": ["y"]}], False),
    ([{"required": ["x"]}, True], False),
    ([{"required": ["x"]}, {"required": ["y"], "properties": []}], False),
    ([{"required": [f"x{number}"]} for number in range(99)], False),
    ([{"const": 1}, {"const": 1.0}], False),
    ([{"type": "string"}, {"type": "string", "enum": ["x"]}], False),
    ([{"required": ["x"]}, {"required": ["x"]}], False),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
    ([{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}], False),
]


@pytest.mark.parametrize(("parts", "is_exact"), CHOICES)
def test_a_choice_is_noted_only_if_a_value_may_match_twice(parts, is_exact):
    loop = {"type": "object", "properties": {"x": {"$ref": "#/$defs/loop"}}, "required": ["x"]}
    loop = {"anyOf": [{"type": "null"}, loop], "allOf": [{"$ref": "#/$defs/loop"}]}
    definitions = {"a": KINDS[0], "b": KINDS[1], "loop": loop}
    schema = {**around({"oneOf": parts}), "$defs": definitions}
    notes = Parameters.of(tool("odd", schema)).notes
    assert ("#/properties/a/oneOf" in notes) is not is_exact


LIMITED = {
    "texts": ({"enum": ["a", "abc", 7], "minLength": 2}, ['"abc"', "7"], ['"a"'], {}),
    "numbers": ({"enum": [1, 2.5, "1", True], "exclusiveMinimum": 1}, ["2.5", '"1"'], ["1"], {}),
    "lists": ({"enum": [[], [1, 2]], "maxItems": 1}, ["[]"], ["[1, 2]"], {}),
    "all of both": ({"allOf": [{"enum": [1, 5]}, {"maximum": 3}]}, ["1"], ["5"], {}),
    "none": ({"enum": [1, 5], "minimum": 9}, ["1", "5"], ["9"], {"enum"}),
    "a pattern": ({"enum": ["a", "b"], "pattern": "^a$"}, ['"a"', '"b"'], ['"c"'], {"pattern"}),
}


@pytest.mark.parametrize("case", LIMITED)
def test_values_of_an_enumeration_have_the_size_that_is_asked_for(case):
    model, (part, right, wrong, noted) = MODELS["hermes_json"], LIMITED[case]
    offered = tool("odd", around(part, required=["a"]))
    grammar = model.grammar([offered], ONE_CALL)
    call = '<tool_call>\n{{"name": "odd", "arguments": {{"a": {}}}}}\n</tool_call>'
    for values, is_right in ((right, True), (wrong, False)):
        for value in values:
            assert is_whole(grammar, call.format(value), model.vocabulary) is is_right, value
    assert {*Parameters.of(offered).notes} == {f"#/properties/a/{keyword}" for keyword in noted}


@pytest.mark.parametrize(
    "others", [{"additionalProperties": True}, {"patternProperties": {"^x": {"type": "null"}}}]
)
def test_a_limit_of_properties_that_an_open_object_may_exceed_is_noted(others):
    part = {"type": "object", "properties": {"b": {}, "c": {}}, "maxProperties": 2}
    assert not Parameters.of(tool("odd", around(part))).notes
    notes = Parameters.of(tool("odd", around(part | others))).notes
    assert {*notes} == {"#/properties/a/maxProperties"}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        *[(r"^\d$", "1"), (r"^[\d-]$", "-"), (r"^\w$", "b"), (r"^[^\W1]$", "b")],
        *[(r"^[!-/:-@[-`{-~]$", "["), (r"^[+--]$", ","), (r"^\d$|^b$", "b"), (r"^[1&&]$", "&")],
        *[(r"^{\w}{2}$", "{b}}"), (r"^[\0a]$", "a"), (r"^[1\]]$", "]"), (r"^\x62$", "b")],
    ],
)
def test_digits_and_letters_of_raw_values_are_those_of_json(pattern, text):
    model, part = MODELS["qwen3_coder_xml"], {"type": "string", "pattern": pattern}
    grammar = model.grammar([tool("odd", around(part, required=["a"]))], ONE_CALL)
    call = "<tool_call>\n<function=odd>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert is_whole(grammar, call.format(text), model.vocabulary)
    for other in ("\u0663", "\u00e9", "ab"):
        assert not is_whole(grammar, call.format(other), model.vocabulary)


VALID = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^[a-z ]+$"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 10},
        "kind": {"enum": ["a", "b", None]},
        "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "minItems": 1, "maxItems": 4},
        "filter": {
            "allOf": [
                {"$ref": "#/$defs/Tag"},
                {"type": "object", "properties": {"not": {"type": "boolean"}}},
            ]
        },
        "other": {"oneOf": [{"type": "number", "multipleOf": 0.5}, {"type": "string"}]},
        "open": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["query", "kind"],
    "additionalProperties": False,
    "$defs": {
        "Tag": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "inner": {"$ref": "#/$defs/Tag"}},
            "required": ["name"],
        }
    },
}
KEYWORDS = (
    *("type", "properties", "required", "items", "enum", "const", "pattern", "minimum", "format"),
    *("maxLength", "minItems", "anyOf", "oneOf", "allOf", "$ref", "additionalProperties", "not"),
    *("if", "nullable", "exclusiveMinimum", "multipleOf", "prefixItems", "patternProperties"),
)
VALUES = (
    *(None, True, False, 0, -1, 1.5, 5, 10**18, "", "1", "x", "string", "int", "(", "#", "#/$defs"),
    *([], {}, [None], [1], ["a"], ["name"], [{}], [False], {"a": 1}, {"a": {}}, {"type": "x"}),
    *({"$ref": "#"}, {"$ref": "#/$defs/Tag"}, [{"$ref": "#/properties/filter"}], ["null", "int"]),
)


def places(value):
    """Return all containers in a schema."""
    inner = value.values() if isinstance(value, dict) else value
    found = [part for part in inner if isinstance(part, dict | list)]
    return [value, *(place for part in found for place in places(part))]


def broken(schema, changes):
    """Return a schema with some of its parts dropped, replaced, nested, null or as text."""
    schema = deepcopy(schema)
    for where, what, how, keyword in changes:
        all_places = places(schema)
        place = all_places[where % len(all_places)]
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = keys[what % len(keys)] if keys else None
        match how:
            case "add" if isinstance(place, dict):
                place[keyword] = deepcopy(VALUES[what % len(VALUES)])
            case "drop" if keys:
                del place[key]
            case "replace" if keys:
                place[key] = deepcopy(VALUES[(what + where) % len(VALUES)])
            case "nest" if keys:
                place[key] = {keyword: place[key]} if what % 2 else [place[key]]
            case "text" if keys:
                place[key] = str(place[key])
            case "move" if keys:
                other = all_places[(where + what) % len(all_places)]
                place[key] = deepcopy(other)
    return schema


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.integers(0, 99),
        st.sampled_from(["add", "drop", "replace", "nest", "text", "move"]),
        st.sampled_from(KEYWORDS),
    ),
    min_size=1,
    max_size=5,
)
ORIGINALS = (VALID, NOTES.parameters, *SCHEMAS.values())


@settings(max_examples=150)
@given(st.sampled_from(DIALECTS), st.integers(0, len(ORIGINALS) * 3), CHANGES)
def test_whatever_is_broken_in_a_schema_no_other_tool_notices(name, number, changes):
    original = ORIGINALS[number // 3 if number < len(ORIGINALS) * 3 else 0]
    odd = tool("odd", broken(original, changes))
    MODELS[name].require_held([odd, NOTES])
    assert MODELS[name].refusal([odd])[:12] in ("", "tool 'odd': ")


SAME = {
    "choices with a tag": {
        "oneOf": [{"$ref": "#/$defs/D"}, {"$ref": "#/$defs/Tree"}],
        "discriminator": {"propertyName": "name"},
    },
    "names of any text": {"type": "object", "propertyNames": {"type": "string", "title": "T"}},
    "names in a list": {"type": "object", "propertyNames": {"enum": ["x"]}},
    "names in a definition": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Color"},
        "$defs": {"Color": {"enum": ["red"], "type": "string"}},
    },
    "a schema of the text inside": {"type": "string", "contentSchema": {"type": "object"}},
    "no condition": {"type": "array", "uniqueItems": False, "unevaluatedItems": {}},
}


@pytest.mark.parametrize("part", SAME.values(), ids=SAME)
def test_what_other_keywords_say_as_well_is_held_without_a_note(part):
    assert Parameters.of(tool("odd", around(part))).notes == {}


def test_counted_properties_inside_others_cost_only_the_outer_count():
    part = {"type": "string"}
    for depth in range(3):
        others = {f"p{depth}{number}": {"type": "integer"} for number in range(15)}
        part = {"type": "object", "properties": {**others, "deep": part}, "minProperties": 1}
    notes = Parameters.of(tool("odd", around(part))).notes
    outer = ["#/properties/a", "#/properties/a/properties/deep"]
    assert {*notes} == {f"{pointer}/minProperties" for pointer in outer}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_sound_schema_keeps_all_its_conditions(name):
    offered = MODELS[name].held.offered([NOTES, tool("search", VALID)])
    assert [each.parameters.notes for each in offered.held] == [{}, {}]
    MODELS[name].compiler.compile(offered.grammar(AUTO))
