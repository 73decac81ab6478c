"""Arguments obey the schema of their tool, in the notation of each kind of family."""

import json
from itertools import product

import pytest
from golden import tool_format
from grammar_driver import tool_grammar
from tool_replies import tool
from tool_walks import TinyVocabulary, is_whole

from backend.errors import GrammarError
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.tool_calls import writable
from backend.sampling.grammar.tool_parameters import CallRule, Parameters
from backend.sampling.grammar.writer import GrammarWriter, quoted

VOCABULARY = TinyVocabulary()
ONE_CALL = CallRule(least=1, most=1, has_text=False)
REPLIES = {
    "hermes_json": '<tool_call>\n{"name": "f", "arguments": {"a": VALUE}}\n</tool_call>',
    "qwen3_coder_xml": "<tool_call>\n<function=f>\n<parameter=a>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm4": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "minicpm5": '<function name="f"><param name="a">VALUE</param></function>',
    "gemma4": "<|tool_call>call:f{a:VALUE}<tool_call|>",
    "pythonic": "[f(a=VALUE)]",
}
STRING = {"type": "string"}
NESTED = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": STRING, "b": {"type": "boolean"}},
    "required": ["s"],
}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


def grammar(family, schema, *, definitions=None, is_required=True):
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions or {}}
    parameters["required"] = ["a"] if is_required else []
    return tool_grammar(tool_format(family), [tool("f", parameters)], ONE_CALL, VOCABULARY)


def accepted(family, schema, values, **options):
    compiled = GrammarCompiler(VOCABULARY).compile(grammar(family, schema, **options))
    reply = REPLIES[family]
    return [v for v in values if is_whole(compiled, reply.replace("VALUE", v), VOCABULARY)]


Q = '<|"|>'
CASES = {
    "json string": (
        "hermes_json",
        STRING,
        ['"a\\nb </tool_call> é"', '""'],
        ["a", "'a'", "1", '"\n"'],
    ),
    "json number": (
        "hermes_json",
        {"type": "number"},
        ["1", "-0.5", "1700000000000000"],
        ["1e400", "9" * 16, "0." + "1" * 10, "NaN", '"1"'],
    ),
    "json array": (
        "hermes_json",
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        ["[1, 2]"],
        ["[]", "[1,2]", '["1"]'],
    ),
    "json of any kind": (
        "hermes_json",
        {},
        ['{"x": [1, null, {"y": "z"}]}', "true", "1.5"],
        ["1e400", '[{"x": 1e400}]'],
    ),
    "json object": (
        "hermes_json",
        NESTED,
        ['{"s": ""}', '{"n": 1, "s": "x", "b": true}', '{"s": "x", "n": 1}'],
        ["{}", '{"n": 1}', '{"s": "x", "s": "y"}', '{"s": "x", "y": 1}'],
    ),
    "a reference in a schema with an address": (
        "hermes_json",
        {
            "$id": "https://example.com/inner",
            "$defs": {
                "T": {"type": "integer"},
                "U": {"$id": "parts/u", "$ref": "#/$defs/V", "$defs": {"V": {"type": "null"}}},
            },
            "type": "array",
            "prefixItems": [
                {"$ref": "#/$defs/T"},
                {"$ref": "parts/u"},
                {"$ref": "/inner#/$defs/U/$defs/V"},
            ],
            "items": {"$ref": "https://example.com/parts/u#/$defs/V"},
        },
        ["[1]", "[1, null, null, null]"],
        ['["x"]', "[1, 2]", "[1, null, 1]", "[1, null, null, 1]"],
    ),
    "a definition without a name": (
        "hermes_json",
        {
            "$defs": {"": {"$defs": {"": {"type": "integer"}}}},
            "$ref": "#/properties/a/$defs//$defs/",
        },
        ["1"],
        ['"x"'],
    ),
    "choices with a tag": (
        "hermes_json",
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": kind, "default": kind}}}
                for kind in ("cat", "dog")
            ],
            "discriminator": {"propertyName": "kind"},
        },
        ['{"kind": "cat"}', '{"kind": "dog"}'],
        ["{}", '{"kind": "cow"}'],
    ),
    "exactly one property": (
        "hermes_json",
        {"type": "object", "properties": {"n": {"type": "integer"}, "s": STRING}}
        | {"minProperties": 1, "maxProperties": 1},
        ['{"n": 1}', '{"s": ""}'],
        ["{}", '{"n": 1, "s": ""}'],
    ),
    "at least one property in braces": (
        "gemma4",
        {"type": "object", "properties": {"n": {"type": "integer"}, "m": {"type": "integer"}}}
        | {"minProperties": 1},
        ["{n:1}", "{m:1}", "{m:1,n:1}"],
        ["{}"],
    ),
    "names of properties in a list": (
        "hermes_json",
        {
            "type": "object",
            "propertyNames": {"enum": ["x", "y"]},
            "additionalProperties": {"type": "integer"},
        },
        ["{}", '{"x": 1, "y": 2}'],
        ['{"z": 1}', '{"x": "1"}'],
    ),
    "names of properties of a length": (
        "hermes_json",
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 3}},
        ['{"abc": 1}'],
        ['{"": 1}', '{"abcd": 1}'],
    ),
    "raw string": (
        "qwen3_coder_xml",
        STRING,
        [
            *("", "milk", "null", "12", '"quoted"', "a\n\n</b> <parameter\n", "\n"),
            *("</function>", "</tool_call>", "</parameter> x", "x\n</parameter>\ny"),
        ],
        [
            *("</parameter>", "x\n</parameter>\n<parameter=b>\nx", "x</parameter></tool_call>"),
            *("x\n<parameter=b>\n", "</function>\n</tool_call>", "</parameter"),
        ],
    ),
    "raw string of a length": (
        "glm4",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["ab", "é\n<"],
        ["a", "abcd", ""],
    ),
    "raw pattern": (
        "glm4",
        {"type": "string", "pattern": "^[a-z]+/[0-9]{2}"},
        ["ab/12", "ab/12 and more\n"],
        ["Ab/12", " ab/12", "ab/1"],
    ),
    "raw pattern with a slash among characters": (
        "glm4",
        {"type": "string", "pattern": "^([/_.\\-a-z0-9=, ()!\\/\n])+$"},
        ["a/b=c, d", "/", "(x)\n!"],
        ["a;b", "", "A"],
    ),
    "raw pattern in the midst": (
        "glm4",
        {"type": "string", "pattern": "a|b[$^]"},
        ["xay", "b$", "b^"],
        ["b", "x"],
    ),
    "raw date": (
        "glm4",
        {"type": "string", "format": "date-time"},
        ["2024-02-29T12:00:00Z", "2024-02-29T12:00:00.123+02:00"],
        ["2024-02-29", "2024-13-29T12:00:00Z", "2023-02-29T12:00:00Z", "2024-02-29T12:00:60Z"],
    ),
    "raw address": (
        "glm4",
        {"type": "string", "format": "uri"},
        ["https://example.com/a?b=c#d", "urn:a:b"],
        ["example.com", "https://a b/", "https://a/\\"],
    ),
    "raw string or null": (
        "qwen3_coder_xml",
        {"type": ["string", "null"]},
        ["null", "milk", "12", "nullable", "[null]"],
        ["None", "NULL", " null "],
    ),
    "raw string or number": (
        "qwen3_coder_xml",
        {"anyOf": [STRING, {"type": "integer", "maximum": 99}]},
        ["12", "milk", "true", "v12"],
        ["100", "1.5", "+1"],
    ),
    "raw string or list": (
        "qwen3_coder_xml",
        {"anyOf": [STRING, {"type": "array", "items": {"type": "integer"}}]},
        ["[1, 2]", "milk", "true", "a [1]"],
        ['["a"]', "[1,2]", "(1)", "{"],
    ),
    "raw choice": (
        "qwen3_coder_xml",
        {"enum": ["on", "two words", 1, None]},
        ["on", "1", "null"],
        ["o", "2", ""],
    ),
    "raw constant": ("glm4", {"const": "1"}, ["1"], ["2", ""]),
    "raw boolean": (
        "glm4",
        {"type": "boolean"},
        ["true", "false", "True", "False"],
        ["TRUE", "1", "yes", "null"],
    ),
    "raw boolean constant": ("glm4", {"const": True}, ["true"], ["True", "false"]),
    "raw object": (
        "glm4",
        NESTED,
        ['{"n": 1, "s": "</b> <c"}', '{"s": "</arg_value>"}', '{"s": "</tool_call>"}'],
        ["{'s': 1}", "s"],
    ),
    "raw of any kind": ("glm4", {}, ["anything", '{"x": 1}', "12", ""], ["</arg_value>"]),
    "raw map": (
        "glm4",
        {"type": "object"},
        ['{"a</b>": "</c>"}', "{}", '{"</arg_value>": 1}', '{"a": {"b": ["</arg_value>"]}}'],
        ['{"a": 1}</arg_value>', "a"],
    ),
    "raw markup": (
        "minicpm5",
        STRING,
        ["milk", "<![CDATA[<b> & ]] > \n</param>]]>", "a\nb", "<![CDATA[]]>]]>"],
        ["a < b", "a & b", "<![CDATA[]]></param></function>]]>", "<![CDATA[]]></param>]]>"],
    ),
    "quoted string": (
        "gemma4",
        STRING,
        [f'{Q}say "hi" {{<b>}}\n{Q}', f"{Q}{Q}"],
        ["milk", '"milk"', f"{Q}a{Q}b{Q}"],
    ),
    "quoted nested": (
        "gemma4",
        {"type": "array", "items": NESTED, "maxItems": 2},
        [f"[{{s:{Q}x{Q}}},{{b:true,n:1,s:{Q}{Q}}}]", f"[{{s:{Q}x{Q},n:1}}]", "[]"],
        ["[{n:1}]", f"[{{s:{Q}x{Q},n:1,n:2}}]", f"[{{s:{Q}x{Q}}},{{s:{Q}x{Q}}},{{s:{Q}x{Q}}}]"],
    ),
    "quoted choice": (
        "gemma4",
        {"enum": ["on", 1, None, True]},
        [f"{Q}on{Q}", "1", "null", "true"],
        ["on"],
    ),
    "quoted of any kind": (
        "gemma4",
        {},
        [f"{{k:[1,{Q}x{Q},null]}}", "2.5", f"{Q}{Q}"],
        ["x", '{"k":1}'],
    ),
    "python string": (
        "pythonic",
        STRING,
        ["'milk'", '"it\'s \\"so\\""', "'a\nb'", r"'it\'s'", "''", '"é\\n"'],
        ["milk", "'it's'", '"a"b"'],
    ),
    "python limits": (
        "pythonic",
        {"type": "string", "maxLength": 2},
        ["'ab'", '"ab"', "''"],
        ["'abc'", '"abc"', r"'\''"],
    ),
    "python constants": (
        "pythonic",
        {"type": ["boolean", "null"]},
        ["True", "true", "False", "None", "null"],
        ["TRUE", "'True'", "0"],
    ),
    "python nested": (
        "pythonic",
        {"type": "array", "items": {"anyOf": [STRING, {"type": "number"}]}},
        ["['a', \"b\", 1.5]", "[]"],
        ["['a' 'b']", "('a',)", "[None]"],
    ),
    "python choice": (
        "pythonic",
        {"enum": ["on", "it's", [1, "x"]]},
        ["'on'", '"it\'s"', "[1, 'x']"],
        ["on", "'it's'"],
    ),
    "python map": (
        "pythonic",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ['{"x": 1, "y": 2}', "{}"],
        ["{'x': 'a'}", "{x: 1}"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_value_is_what_the_schema_allows(name):
    family, schema, good, bad = CASES[name]
    assert accepted(family, schema, good + bad) == good


@pytest.mark.parametrize("family", REPLIES)
def test_references_are_followed_however_often(family):
    node = {"qwen3_coder_xml": '{"next": {"next": {}}}', "gemma4": "{next:{next:{}}}"}
    text = node.get(family, node["qwen3_coder_xml"])
    definitions = {"node": NODE}
    schema = {"$ref": "#/$defs/node", "description": "A node."}
    wrong = text.replace("next", "last")
    assert accepted(family, schema, [text, wrong], definitions=definitions) == [text]


@pytest.mark.parametrize("family", REPLIES)
def test_a_parameter_that_is_not_required_may_be_missing(family):
    compiled = GrammarCompiler(VOCABULARY).compile(grammar(family, STRING, is_required=False))
    empty = {
        "hermes_json": REPLIES["hermes_json"].replace('"a": VALUE', ""),
        "qwen3_coder_xml": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "glm4": "<tool_call>f</tool_call>",
        "minicpm5": '<function name="f"></function>',
        "gemma4": "<|tool_call>call:f{}<tool_call|>",
        "pythonic": "[f()]",
    }
    assert is_whole(compiled, empty[family], VOCABULARY)
    required = GrammarCompiler(VOCABULARY).compile(grammar(family, STRING))
    assert not is_whole(required, empty[family], VOCABULARY)


@pytest.mark.parametrize("family", REPLIES)
@pytest.mark.parametrize(
    ("schema", "left_out", "value", "wrong"),
    [
        ({"type": "integer", "not": {"multipleOf": 2}}, "#/properties/a/not", "1", "x"),
        ({"type": "int", "minimum": "5"}, "#/properties/a/minimum", "1", "x"),
        ({"type": "boolean", "$ref": "#/$defs/no"}, "#/properties/a/$ref", "true", "1"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/properties/a/oneOf", "1", "x"),
    ],
)
def test_what_cannot_be_enforced_is_left_out_and_the_rest_holds(
    family, schema, left_out, value, wrong
):
    assert accepted(family, schema, [value, wrong]) == [value]
    assert list(held(family, schema).notes) == [left_out]


@pytest.mark.parametrize(
    ("family", "schema", "left_out", "text"),
    [
        ("glm4", {"type": "string", "pattern": "^(^a|b$)"}, "/pattern", "c"),
        ("gemma4", {"type": "string", "pattern": "(^a)"}, "/pattern", f"{Q}c{Q}"),
        ("glm4", {"enum": ["1", 1]}, "", "2"),
        ("gemma4", {"type": "array", "prefixItems": [STRING]}, "/prefixItems", "[1]"),
        (
            "pythonic",
            {"type": "object", "patternProperties": {"^b": STRING}},
            "/patternProperties",
            "{}",
        ),
    ],
)
def test_what_only_some_formats_can_enforce_is_left_out_in_the_others(
    family, schema, left_out, text
):
    assert accepted(family, schema, [text]) == [text]
    assert list(held(family, schema).notes) == [f"#/properties/a{left_out}"]
    assert not held("hermes_json", schema).notes


def held(family, schema):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    offered = Parameters.of(tool("f", parameters))
    return writable(tool_format(family), offered, VOCABULARY)


@pytest.mark.parametrize("family", REPLIES)
@pytest.mark.parametrize("schema", [False, {"allOf": [STRING, {"type": "null"}]}])
def test_a_tool_that_no_arguments_fit_is_told_by_its_name(family, schema):
    with pytest.raises(GrammarError, match=r"tool 'f': #: the schema allows no object"):
        grammar(family, schema)
    unwritten = grammar(family, {"anyOf": [schema, {"type": "integer"}]})
    assert unwritten


@pytest.mark.parametrize("family", REPLIES)
def test_an_object_may_hold_what_is_required_although_it_is_not_declared(family):
    parameters = {"type": "object", "properties": {"b": {}}, "required": ["a"]}
    offered = [tool("f", parameters)]
    allowed = tool_grammar(tool_format(family), offered, ONE_CALL, VOCABULARY)
    compiled = GrammarCompiler(VOCABULARY).compile(allowed)
    assert is_whole(compiled, REPLIES[family].replace("VALUE", "[1]"), VOCABULARY)


@pytest.mark.parametrize("family", REPLIES)
def test_schemas_that_must_all_match_are_joined(family):
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    others = {"type": "object", "properties": {"b": STRING}}
    parameters = {"$defs": {"Base": base}, "allOf": [{"$ref": "#/$defs/Base"}, others]}
    allowed = tool_grammar(tool_format(family), [tool("f", parameters)], ONE_CALL, VOCABULARY)
    compiled = GrammarCompiler(VOCABULARY).compile(allowed)
    assert is_whole(compiled, REPLIES[family].replace("VALUE", "1"), VOCABULARY)
    assert not is_whole(compiled, REPLIES[family].replace("VALUE", "x"), VOCABULARY)


def test_arguments_are_an_object():
    with pytest.raises(
        GrammarError, match=r"tool 'f': #: the schema allows no object of arguments"
    ):
        tool_grammar(tool_format("glm4"), [tool("f", {"type": "array"})], ONE_CALL, VOCABULARY)


def test_an_open_tool_takes_any_arguments_in_json():
    parameters = {"type": "object", "additionalProperties": True}
    allowed = tool_grammar(
        tool_format("hermes_json"), [tool("f", parameters)], ONE_CALL, VOCABULARY
    )
    compiled = GrammarCompiler(VOCABULARY).compile(allowed)
    assert is_whole(compiled, REPLIES["hermes_json"].replace("VALUE", json.dumps([1])), VOCABULARY)


ITEM = {"type": "object", "properties": {"x": STRING, "y": {"type": "integer"}}}
TREE = {
    "type": "object",
    "properties": {"x": STRING, "y": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["x"],
}
DEFINITIONS = {
    "item": ITEM,
    "tree": TREE,
    "names": {"type": "object", "properties": {"x": STRING, "y": {"enum": [*range(300)]}}},
}
EITHER = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/item"}]}


@pytest.mark.parametrize("family", ["hermes_json", "qwen3_coder_xml", "glm4", "minicpm5"])
@pytest.mark.parametrize(
    ("schema", "values", "refused"),
    [
        ({"$ref": "#/$defs/item"}, ['{"y": 1, "x": "b"}', '{"y": 1}'], ['{"y": "b"}']),
        (EITHER, ["null", '{"y": 1, "x": "b"}'], ['{"y": 1, "y": 1}', "1"]),
        (
            {"anyOf": [ITEM, {"type": "object", "properties": {"z": STRING, "x": STRING}}]},
            ['{"y": 1, "x": "b"}', '{"x": "b", "z": "c"}'],
            ['{"y": 1, "z": "c"}'],
        ),
        ({**ITEM, "type": ["null", "object"]}, ["null", '{"y": 1, "x": "b"}'], ['{"z": 1}']),
        ({"type": "array", "items": EITHER}, ['[null, {"y": 1, "x": "b"}]'], ["[1]"]),
        (
            {"$ref": "#/$defs/tree"},
            ['{"y": [{"y": [], "x": "b"}, {"x": ""}], "x": "c"}'],
            ['{"y": []}', '{"y": [{"y": []}], "x": "c"}'],
        ),
        ({"$ref": "#/$defs/names"}, ['{"y": 299, "x": "b"}'], ['{"y": 300}']),
    ],
)
def test_objects_of_references_and_choices_have_their_members_in_any_order(
    family, schema, values, refused
):
    """Libraries refer to each model by `$ref`, and make an optional one a choice."""
    found = accepted(family, schema, [*values, *refused], definitions=DEFINITIONS)
    assert found == values


@pytest.mark.parametrize("family", [*REPLIES, "minimax_m3"])
def test_a_long_chain_of_definitions_needs_no_deep_stack(family):
    chained = {
        f"d{n}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(400)
    }
    definitions = {**chained, "d400": {"type": "integer"}}
    rule = grammar(family, {"$ref": "#/$defs/d0"}, definitions=definitions)
    GrammarCompiler(VOCABULARY).compile(rule)


def test_rules_that_could_not_be_written_are_not_known():
    writer = GrammarWriter("x", VOCABULARY)

    def body():
        writer.recursive_rule("inner", lambda: f"{quoted('b')} {writer.rule(quoted('c'))}")
        raise GrammarError("no")

    writer.recursive_rule("other", lambda: quoted("a"))
    for _ in range(2):
        with pytest.raises(GrammarError, match="no"):
            writer.recursive_rule("outer", body)
    outer = writer.recursive_rule("outer", lambda: writer.recursive_rule("inner", lambda: '"d"'))
    assert outer != writer.recursive_rule("other", lambda: "")
    compiled = GrammarCompiler(VOCABULARY).compile(writer.grammar(outer))
    assert is_whole(compiled, "d", VOCABULARY)


# Begins, separators and ends of calls with members of the value 1.
MEMBERS = {
    "hermes_json": (
        '<tool_call>\n{"name": "f", "arguments": {',
        '"%s": 1',
        ", ",
        "}}\n</tool_call>",
    ),
    "qwen3_coder_xml": (
        "<tool_call>\n<function=f>\n",
        "<parameter=%s>\n1\n</parameter>\n",
        "",
        "</function>\n</tool_call>",
    ),
    "glm4": (
        "<tool_call>f\n",
        "<arg_key>%s</arg_key>\n<arg_value>1</arg_value>\n",
        "",
        "</tool_call>",
    ),
    "minicpm5": ('<function name="f">', '<param name="%s">1</param>', "", "</function>"),
    "gemma4": ("<|tool_call>call:f{", "%s:1", ",", "}<tool_call|>"),
    "pythonic": ("[f(", "%s=1", ", ", ")]"),
}


def members_accepted(family, required, optional, orders):
    """Return those of some orders of members that a call may have."""
    one = {"type": "integer"}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(sorted((*required, *optional)), one),
        "required": [*required],
    }
    rule = tool_grammar(tool_format(family), [tool("f", schema)], ONE_CALL, VOCABULARY)
    compiled = GrammarCompiler(VOCABULARY).compile(rule)
    begin, member, between, end = MEMBERS[family]

    def is_accepted(names):
        text = begin + between.join(member % name for name in names) + end
        return is_whole(compiled, text, VOCABULARY)

    return [names for names in orders if is_accepted(names)]


@pytest.mark.parametrize("family", MEMBERS)
@pytest.mark.parametrize(("required", "optional"), [("", "xy"), ("a", ""), ("xz", "ay")])
@pytest.mark.one_in(3)
def test_members_come_once_each_in_any_order_and_all_that_are_required(family, required, optional):
    every = [*required, *optional]
    sequences = [names for count in range(len(every) + 2) for names in product(every, repeat=count)]
    expected = [
        names for names in sequences if {*required} <= {*names} and len({*names}) == len(names)
    ]
    assert members_accepted(family, required, optional, sequences) == expected


@pytest.mark.parametrize("family", MEMBERS)
def test_many_members_come_once_each_in_any_order(family):
    """Up to 64 of them; a push to GitHub requires six."""
    required, optional = [f"r{n}" for n in range(30)], [f"x{n}" for n in range(34)]
    every = [*required, *optional]
    allowed = [tuple(every), tuple(every[::-1]), (*required[5:], "x1", *required[:5])]
    refused = [(*every, "x0"), (*every, "r0"), tuple(every[1:]), ("x1", *every), ()]
    assert members_accepted(family, required, optional, [*allowed, *refused]) == allowed


@pytest.mark.parametrize("family", MEMBERS)
def test_very_many_members_come_once_each_in_any_order_of_64(family):
    names = [f"m{n:03}" for n in range(150)]
    groups = names[:64], names[64:128], names[128:]
    required = names[60:70]
    reversed_ones = tuple(name for group in groups for name in group[::-1])
    allowed = [tuple(names), reversed_ones, tuple(required), (*required, "m149")]
    refused = [(*names, "m149"), tuple(required[1:]), tuple(required[:-1]), (*required, "m000")]
    optional = [name for name in names if name not in required]
    assert members_accepted(family, required, optional, [*allowed, *refused]) == allowed
    assert members_accepted(family, [], names, [("m149",), (), ("m149", "m000")]) == [
        ("m149",),
        (),
    ]


@pytest.mark.parametrize("name", REPLIES)
def test_an_id_of_64_bits_can_be_an_integer(name):
    ids = ["1234567890123456789", "-1001234567890123", "9007199254740993"]
    assert accepted(name, {"type": "integer"}, [*ids, "9" * 19, "1" * 20]) == ids


@pytest.mark.parametrize("name", REPLIES)
def test_a_bound_of_integers_beyond_those_of_a_double_holds(name):
    schema = {"type": "integer", "exclusiveMinimum": 2 * 10**15, "maximum": 2**60 + 1}
    assert not Parameters.of(tool("f", {"properties": {"a": schema}})).notes
    values = ["2000000000000000", "1152921504606847232", "2000000000000001", str(2**60)]
    assert accepted(name, schema, values) == values[2:]


@pytest.mark.parametrize("bound", [{"minimum": 1e20}, {"exclusiveMaximum": -1e300}])
def test_a_bound_that_no_number_meets_is_noted_and_free(bound):
    schema = {"type": "integer", **bound}
    notes = Parameters.of(tool("f", {"properties": {"a": schema}})).notes
    assert notes == {f"#/properties/a/{next(iter(bound))}": "allows no number that can be written"}
    assert accepted("hermes_json", schema, ["1"]) == ["1"]
