"""`if`, `not` and `dependentSchemas`: in an answer's schema, and in a tool's."""

import json

import pytest
from golden import tool_format
from grammar_driver import accepts, compile_text, tool_grammar
from jsonschema import Draft202012Validator
from tool_replies import FORMATS, tool
from tool_walks import TinyVocabulary, is_whole

from backend.errors import GrammarError
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.tool_calls import writable
from backend.sampling.grammar.tool_parameters import CallRule, Parameters

STRING, INTEGER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
REPLY = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
ONE_CALL = CallRule(least=1, most=1, has_text=False)


def of(properties, required=(), **more):
    return {"type": "object", "properties": properties, "required": [*required], **more}


def tagged(value, **more):
    return {"properties": {"k": {"const": value}}, **more}


KINDS = [f"k{number}" for number in range(24)]
CASES = {
    "a listed value": (
        of(
            {"k": {"enum": ["a", "b"]}, "x": STRING, "y": STRING},
            ["k"],
            **{"if": tagged("a"), "then": {"required": ["x"]}, "else": {"required": ["y"]}},
        ),
        [{"k": "a", "x": ""}, {"k": "a", "y": ""}, {"k": "b", "y": ""}, {"k": "b", "x": ""}],
    ),
    "a value of a free text": (
        of(
            {"k": STRING, "x": STRING},
            ["k"],
            **{
                "if": tagged("US"),
                "then": {"properties": {"x": {"pattern": "^[0-9]$"}}},
                "else": {"properties": {"x": {"pattern": "^[A-Z]$"}}},
            },
        ),
        [{"k": k, "x": x} for k in ("US", "U", "USA", "", "CA") for x in ("1", "A")],
    ),
    "else if": (
        of(
            {"k": STRING, "x": INTEGER, "y": INTEGER, "z": INTEGER},
            ["k"],
            **{
                "if": tagged("a"),
                "then": {"required": ["x"]},
                "else": {
                    "if": tagged("b"),
                    "then": {"required": ["y"]},
                    "else": {"required": ["z"]},
                },
            },
        ),
        [{"k": k, name: 1} for k in "abc" for name in "xyz"],
    ),
    "a value that may be missing": (
        of({"k": FLAG, "x": INTEGER}, **{"if": tagged(True), "then": {"required": ["x"]}}),
        [{}, {"k": False}, {"k": True}, {"k": True, "x": 1}, {"x": 1}],
    ),
    "a required flag": (
        of(
            {"k": FLAG, "x": INTEGER},
            **{"if": tagged(True, required=["k"]), "then": {"required": ["x"]}},
        ),
        [{}, {"k": False}, {"k": True}, {"k": True, "x": 1}],
    ),
    "a limit": (
        of(
            {"k": INTEGER, "x": INTEGER},
            ["k"],
            **{"if": {"properties": {"k": {"minimum": 10}}}, "then": {"required": ["x"]}},
        ),
        [{"k": 9}, {"k": 10}, {"k": 10, "x": 1}],
    ),
    "many values": (
        of(
            {"k": {"enum": KINDS}} | dict.fromkeys(KINDS, INTEGER),
            ["k"],
            allOf=[{"if": tagged(kind), "then": {"required": [kind]}} for kind in KINDS],
        ),
        [{"k": k, name: 1} for k in ("k0", "k23") for name in ("k0", "k23")],
    ),
    "a reference": (
        {
            "$defs": {"K": {"enum": ["a", "b"]}, "A": tagged("a")},
            **of({"k": {"$ref": "#/$defs/K"}, "x": INTEGER}, ["k"]),
            "if": {"$ref": "#/$defs/A"},
            "then": {"required": ["x"]},
        },
        [{"k": "a"}, {"k": "b"}, {"k": "a", "x": 1}],
    ),
    "not a value": (
        of({"x": {**STRING, "not": {"enum": ['a"b', "a\\", "", "é"]}}}, ["x"]),
        [{"x": text} for text in ('a"b', 'a"', 'a"bc', "a\\", "a\\\\", "", "a", "é", "éé", "e")],
    ),
    "not a value of any type": (
        of({"x": {"not": {"enum": ["a", 1, None, True]}}}, ["x"]),
        [{"x": value} for value in ("a", "b", 1, 2, None, True, False, [])],
    ),
    "not a type": (of({"x": {"not": {"type": "null"}}}, ["x"]), [{"x": 1}, {"x": None}, {"x": []}]),
    "not both": (
        of({"x": STRING, "y": STRING}, **{"not": {"required": ["x", "y"]}}),
        [{}, {"x": ""}, {"y": ""}, {"x": "", "y": ""}],
    ),
    "neither pair": (
        of(
            {"x": STRING, "y": STRING, "z": STRING},
            **{"not": {"anyOf": [{"required": ["x", "y"]}, {"required": ["x", "z"]}]}},
        ),
        [{"x": ""}, {"x": "", "y": ""}, {"y": "", "z": ""}, {"x": "", "z": ""}],
    ),
    "a schema that a property brings": (
        of(
            {"x": STRING, "y": INTEGER},
            dependentSchemas={"x": {"properties": {"y": {"minimum": 3}}, "required": ["y"]}},
        ),
        [{}, {"x": ""}, {"x": "", "y": 3}, {"x": "", "y": 2}, {"y": 1}],
    ),
    "inside a list": (
        of(
            {
                "l": {
                    "type": "array",
                    "items": of(
                        {"k": {"enum": ["a", "b"]}, "x": INTEGER},
                        ["k"],
                        **{"if": tagged("a"), "else": {"properties": {"x": False}}},
                    ),
                }
            },
            ["l"],
        ),
        [{"l": [{"k": "a", "x": 1}, {"k": "b"}]}, {"l": [{"k": "b", "x": 1}]}],
    ),
}


def written(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(("schema", "values"), CASES.values(), ids=CASES)
def test_an_answer_meets_the_conditions_of_its_schema(schema, values, compiler):
    compiled = compile_text(compiler, json.dumps(schema))
    allowed = [value for value in values if accepts(compiled, written(value))]
    assert allowed == [value for value in values if Draft202012Validator(schema).is_valid(value)]


@pytest.mark.parametrize(("schema", "values"), CASES.values(), ids=CASES)
def test_arguments_meet_the_conditions_of_a_tool(schema, values):
    family, offered = FORMATS["hermes_json"], tool("f", schema)
    vocabulary = TinyVocabulary(family.markers, (), family.ends)
    parameters = writable(tool_format("hermes_json"), Parameters.of(offered), vocabulary)
    assert "not" not in str(parameters.notes).replace("is not held", "")
    grammar = tool_grammar(tool_format("hermes_json"), [offered], ONE_CALL, vocabulary)
    compiled = GrammarCompiler(vocabulary).compile(grammar)
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    allowed = [text for text in texts if is_whole(compiled, REPLY % text, vocabulary)]
    valid = [text for text in texts if Draft202012Validator(schema).is_valid(json.loads(text))]
    assert allowed == valid


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"type": "string", "not": {"pattern": "a"}}),
        ("not", {"type": "number", "not": {"type": "integer"}}),
        ("not", {"type": "object", "not": {"minProperties": "1"}}),
        ("if", of({}, **{"if": {"properties": {"x": {"format": "date"}}}, "then": {}})),
        ("dependentSchemas", {"type": "object", "dependentSchemas": {"x": 1}}),
        ("not", of({"x": {"enum": [*range(300)], "not": {"const": 1}}})),
    ],
)
def test_a_condition_without_a_known_contrary_is_named(keyword, schema, compiler):
    with pytest.raises(GrammarError, match=f"'{keyword}' is not supported"):
        compile_text(compiler, json.dumps(schema))


def nested(depth, inner):
    """Return a schema whose conditions hold copies of those inside, if all are written out."""
    if not depth:
        return inner
    part = {"properties": {"x": nested(depth - 1, inner)}}
    when = {"required": ["a", "b", "c"]}
    return {"type": "object", "if": when, "else": part}


def test_conditions_inside_of_conditions_are_not_copied_without_end(compiler):
    with pytest.raises(GrammarError, match="'if' is not supported"):
        compile_text(compiler, json.dumps(nested(12, {"type": "integer"})))
