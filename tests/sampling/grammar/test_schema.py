import json
from contextlib import suppress

import pytest
from grammar_driver import accepts, compile_text

from backend.core.guide import ReplyRule
from backend.errors import GrammarError, GrammarSyntaxError
from backend.sampling.grammar.composition import Composer
from backend.sampling.grammar.schema import schema_to_lark

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
CLOSED_A = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
OPEN_B = {"type": "object", "required": ["b"]}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}


def string(**fields):
    return {"type": "string", **fields}


# As zod 4 writes them.
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
ZOD_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)

ACCEPTED_AND_REFUSED = {
    "object": (
        PERSON,
        ['{"name":"é \\" \\u00e9"}', '{"name":"","age":10}'],
        ["{}", '{"age":1}', '{"name":"a","b":1}', '{"name":"a","age":-1}', '{"age":1,"name":"a"}'],
    ),
    "compact only": (
        PERSON,
        ['{"name":"a b","age":10}'],
        [
            '{"name": "a"}',
            '{"name":"a", "age":1}',
            '{ "name":"a"}',
            '{"name":"a"}\n',
            '{"name":"\n"}',
        ],
    ),
    "additional properties by default": (
        {"type": "object", "properties": {"a": {"type": "null"}}},
        ["{}", '{"a":null,"b":[1,{"c":"d"}]}', '{"b":1}'],
        ['{"a":1}'],
    ),
    "additional properties with a schema": (
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        ["{}", '{"x":true,"y":false}'],
        ['{"x":1}'],
    ),
    "required without a schema": ({"type": "object", "required": ["a"]}, ['{"a":[]}'], ["{}"]),
    "pattern properties": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "null"}},
            "additionalProperties": False,
        },
        ["{}", '{"x1":null}'],
        ['{"y":null}', '{"x":1}'],
    ),
    "a pattern of all properties": (
        {"type": "object", "patternProperties": {".*": {"type": "null"}}},
        ["{}", '{"a":null}'],
        ['{"a":1}'],
    ),
    "as many properties as there are": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        ["{}", '{"a":null,"b":null}', '{"b":null}'],
        ['{"c":null}'],
    ),
    "number of properties": (
        {
            "type": "object",
            "additionalProperties": {"type": "null"},
            "minProperties": 1,
            "maxProperties": 2,
        },
        ['{"a":null}', '{"a":null,"b":null}'],
        ["{}", '{"a":null,"b":null,"c":null}'],
    ),
    "references": (
        TREE,
        ['{"value":1}', '{"value":1,"children":[{"value":2,"children":[]},{"value":-3}]}'],
        ['{"children":[]}', '{"value":1,"children":[{}]}', '{"value":1,"children":[1]}'],
    ),
    "a reference to the root": (
        {"type": "array", "items": {"$ref": "#"}},
        ["[]", "[[],[[]]]"],
        ["", "[1]"],
    ),
    "a reference to a part with an odd name": (
        {
            "type": "object",
            "properties": {"a/b~c d": {"type": "null"}, "e": {"$ref": "#/properties/a~1b~0c%20d"}},
        },
        ['{"a/b~c d":null,"e":null}'],
        ['{"e":1}'],
    ),
    "references into words that annotate": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/defs/a"}, "b": {"$ref": "#/definitions/c/d%20e"}},
            "required": ["a"],
            "defs": {
                "a": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/defs/a"}, "type": "array"}]}
            },
            "definitions": {"c": {"d e": {"type": "integer", "minimum": 3, "maximum": 4}}},
            "additionalProperties": False,
        },
        ['{"a":null}', '{"a":[[null]],"b":3}'],
        ['{"a":1}', '{"a":null,"b":5}', '{"a":[1]}'],
    ),
    "a reference beside a bound": (
        {"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": string()}},
        ['"ab"'],
        ['"abc"', "1"],
    ),
    "enum": (
        {"enum": ["a b", 1, None, [2], {"k": "v"}]},
        ['"a b"', "1", "null", "[2]", '{"k":"v"}'],
        ['"a"', "2"],
    ),
    "const": ({"const": {"a": [1, "x"]}}, ['{"a":[1,"x"]}'], ['{"a":[1]}']),
    "a marker in a text": (
        {"enum": ["a <tool_call> b", "<tool_call>"]},
        ['"a <tool_call> b"', '"<tool_call>"'],
        ['"<tool_call"'],
    ),
    "types": ({"type": ["string", "null"]}, ['""', "null"], ["1", "true"]),
    "any value": ({}, ["1", "null", '{"a":[1,"b"]}', '""'], ["", "nul", '{"a":}']),
    "any of": ({"anyOf": [{"type": "integer"}, string()]}, ["12", '"12"'], ["1.5", "null"]),
    "one of": ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ['"a"', '"b"'], ['"c"']),
    "all of": (
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        ["3", "5"],
        ["2", "6", '"4"'],
    ),
    "all of objects": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
            ]
        },
        ['{"a":null,"b":null}'],
        ['{"a":null}'],
    ),
    "array": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        ["[true]", "[true,false]"],
        ["[]", "[1]", "[true,true,true]"],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [string(), {"type": "null"}], "items": False},
        ['["a",null]'],
        ["[null]", '["a",null,1]'],
    ),
    "tuple of an old draft": (
        {"type": "array", "items": [string()], "additionalItems": False},
        ['["a"]'],
        ['["a",1]', "[1]"],
    ),
    "length": (string(minLength=2, maxLength=3), ['"ab"', '"é中😀"'], ['"a"', '"abcd"']),
    "pattern": (
        string(pattern="^[a-c]+-\\d{2}$"),
        ['"abc-12"'],
        ['"abc-1"', '"d-12"', '"xabc-12"'],
    ),
    "pattern anywhere": (string(pattern="b+"), ['"abbc"', '"b"'], ['"ac"']),
    "integer": ({"type": "integer"}, ["0", "-12"], ["01", "1.0", "+1", "-"]),
    "integer bounds": (
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 12},
        ["-5", "11"],
        ["-6", "12"],
    ),
    "number": ({"type": "number"}, ["0", "-1.5", "2e10", "2.5E-3"], ["1.", ".5", "NaN", "1e"]),
    "number bounds": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
        ["0.1", "1.5"],
        ["0", "1.6", "-1"],
    ),
    "multiple": ({"type": "integer", "multipleOf": 25}, ["0", "75", "1000"], ["5", "76"]),
    "multiple of a fraction": ({"type": "number", "multipleOf": 0.25}, ["0.75", "2"], ["0.3"]),
    "format of a number": ({"type": "integer", "format": "int64"}, ["12"], ['"12"']),
    "escapes": (
        string(),
        ['"\\u00e9\\ud83d\\ude00\\n\\"\\\\"', '"é😀"'],
        ['"\\ud83d"', '"\\x"', '"\n"', '"\x7f"'],
    ),
    "null beside a type": (
        {"type": "string", "enum": ["a"], "nullable": True},
        ['"a"', "null"],
        ['"b"'],
    ),
    "null beside other schemas": (
        {"nullable": True, "anyOf": [{"type": "integer"}, string(maxLength=1)]},
        ["1", '"a"', "null"],
        ['"ab"', "true"],
    ),
    "null beside a reference, at the root": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/root",
            "$ref": "#/$defs/x",
            "$defs": {"x": {"type": "integer"}},
            "nullable": True,
        },
        ["1", "null"],
        ['"ab"', "true"],
    ),
    "choices with a tag": (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}},
            "$defs": {
                kind: {"type": "object", "properties": {"kind": {"const": kind, "default": kind}}}
                for kind in ("cat", "dog")
            },
        },
        ['{"kind":"cat"}', '{"kind":"dog"}'],
        ["{}", '{"kind":"cow"}'],
    ),
    "names of properties in a list": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
            "required": ["a"],
        },
        ['{"a":1}', '{"a":1,"b":2}'],
        ["{}", '{"a":"x"}', '{"a":1,"c":2}'],
    ),
    "names of properties by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}},
        ["{}", '{"x1":[]}'],
        ['{"y":1}'],
    ),
    "names of properties in a definition": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Color"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"Color": {"title": "Color", "type": "string", "enum": ["red", "green"]}},
        },
        ["{}", '{"red":1,"green":2}'],
        ['{"blue":1}', '{"red":"x"}'],
    ),
    "names of properties that are choices": (
        {"type": "object", "propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}},
        ['{"a":1,"b":[]}'],
        ['{"c":1}'],
    ),
    "names of properties of a length": (
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}},
        ["{}", '{"é":1,"a\\"":2}'],
        ['{"":1}', '{"abc":1}'],
    ),
    "names of properties of a format": (
        {"type": "object", "propertyNames": {"format": "date"}},
        ['{"2026-11-21":1}'],
        ['{"today":1}'],
    ),
    "names of properties of zod's email": (
        {"type": "object", "propertyNames": string(format="email", pattern=ZOD_EMAIL)},
        ['{"a.b@example.com":1}'],
        ['{".a@example.com":1}', '{"a..b@example.com":1}', '{"a":1}'],
    ),
    "zod's email": (
        string(format="email", pattern=ZOD_EMAIL),
        ['"a.b-@example.com"', '"a@b.cd"'],
        ['".a@b.cd"', '"a..b@c.de"', '"a.@b.cd"', '"a!@b.cd"', '"a@b"'],
    ),
    "zod's duration": (
        string(pattern=ZOD_DURATION),
        ['"P1W"', '"P1Y"', '"P2DT3H"', '"PT1M1,5S"', '"P1Y3DT1H2S"', '"PT4S"'],
        ['"P"', '"PT"', '"P1DT"', '"P1Y1W"', '"P1H"', '"T1H"'],
    ),
    "a format of zod's own": (
        {
            "anyOf": [
                string(format="ulid", pattern="^[0-9A-Z]{2}$"),
                string(format="path", const="/"),
            ]
        },
        ['"0A"', '"/"'],
        ['"0a"', '"x"'],
    ),
    "formats that only annotate": (
        {"type": "array", "items": {"enum": ["/", ""], **string(format="path")}},
        ['["/"]'],
        ['["x"]'],
    ),
    "at least one property": (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
        | {"minProperties": 1},
        ['{"a":null}', '{"b":null}', '{"a":null,"b":null}'],
        ["{}", '{"b":null,"a":null}'],
    ),
    "at most one optional property": (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {}}}
        | {"required": ["b"], "maxProperties": 2.0},
        ['{"b":null}', '{"a":null,"b":null}', '{"b":null,"c":1}'],
        ["{}", '{"a":null,"b":null,"c":1}', '{"b":null,"d":1}'],
    ),
    "exactly one property": (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
        | {"minProperties": 1, "maxProperties": 1},
        ['{"a":null}', '{"b":null}'],
        ["{}", '{"a":null,"b":null}', '{"c":null}'],
    ),
    "keywords that restrict nothing": (
        {
            "$schema": "https://example.com/metaschema",
            "type": "object",
            "propertyNames": {"type": "string"},
            "unevaluatedProperties": True,
            "dependentRequired": {},
            "properties": {
                "list": {"type": "array", "uniqueItems": False, "maxItems": 1.0},
                "text": string(nullable=False, contentSchema={"type": "object"}),
            },
        },
        ['{"list":[1],"text":"{}"}'],
        ['{"list":[1,2]}', '{"text":null}'],
    ),
    "bounds of other languages": (
        {"type": "array", "items": {"type": "number", "minimum": -(2**63), "maximum": 2**64 - 1}},
        ["[1,-2.5,9007199254740992]"],
        ["[9007199254740993]", "[1e300]"],
    ),
    "annotations": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/thing",
            "title": "Thing",
            "description": "a thing",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            "x-order": 3,
            "type": "integer",
        },
        ["1"],
        ['"1"'],
    ),
}
ACCEPTED_AND_REFUSED |= {
    "different items of an enum": (
        {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True, "minItems": 1},
        ['["a"]', '[1,"a"]', '[null,"a",1]'],
        ["[]", '["a","a"]', '[1,"a",1]', '["a",1,null,null]'],
    ),
    "different items of a constant": (
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "uniqueItems": True}
        | {"$defs": {"a": {"const": "a"}}},
        ["[]", '["a"]'],
        ['["a","a"]'],
    ),
    "different items of a long enum": (
        {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True},
        ["[]", "[5,4,3,2,1]"],
        ["[1,2,3,4,5,1]", "[6]"],
    ),
    "different items": (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        ['["a","b"]'],
        ["[1]"],
    ),
    "a regular expression": (string(format="regex"), ['"a+"'], ["1"]),
    "a path of pydantic's": (string(format="new-path"), ['"a/b"'], ["1"]),
    "a decimal of pydantic's": (
        string(pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"),
        ['"1"', '"-0.50"', '"+.5"', '"7."'],
        ['""', '"."', '"-"', '"1e5"', '"+."'],
    ),
    "a pattern of zod's": (string(format="regex", pattern="^a+$"), ['"aa"'], ['"b"']),
    "keys that are numbers": (
        {"type": "object", "propertyNames": {"type": "integer"}, "additionalProperties": {}},
        ["{}", '{"12":1,"-3":null}'],
        ['{"a":1}', '{"1.5":1}'],
    ),
    "keys that are integers or numbers": (
        {"type": "object", "propertyNames": {"type": ["integer", "number"]}},
        ['{"12":1,"1.5":1}'],
        ['{"a":1}'],
    ),
    "keys that are integers or texts": (
        {"type": "object", "propertyNames": {"type": ["integer", "string"]}},
        ['{"12":1,"a":1}'],
        ["1"],
    ),
    "keys of several types": (
        {
            "type": "object",
            "propertyNames": {"anyOf": [{"const": "a"}, {"type": "number", "const": 1}]},
            "additionalProperties": {"type": "boolean"},
        },
        ['{"a":true}', '{"1":true}'],
        ['{"b":true}', '{"a":1}'],
    ),
    "zod's never": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"not": {}}},
            "required": ["a"],
            "additionalProperties": {"not": {}},
        },
        ['{"a":"x"}'],
        ['{"a":"x","b":1}', '{"a":"x","c":1}'],
    ),
    "an integer without bounds": (
        {"type": "integer"},
        ["0", "-12", "123456789012345678", "9223372036854774784"],
        [19 * "9", 400 * "1", "1.5"],
    ),
    "an integer with one bound": (
        {"type": "integer", "minimum": 5},
        ["5", 18 * "9"],
        ["4", 20 * "9"],
    ),
    "one of a definition and null": (
        {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": CLOSED_A}},
        ["null", '{"a":1}'],
        ['{"b":1}', "1"],
    ),
    "one of closed definitions": (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": CLOSED_A, "b": {**CLOSED_A, "required": ["b"], "properties": {"b": {}}}},
        },
        ['{"a":1}', '{"b":1}'],
        ['{"a":1,"b":1}', "{}"],
    ),
    "exactly one of two properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"], "title": "b"}],
        },
        ['{"a":null}', '{"b":null,"c":null}'],
        ["{}", '{"a":null,"b":null}', '{"c":null}'],
    ),
    "one of open objects": (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {**OPEN_B, "properties": {"b": {}}}, {"type": "null"}],
            "$defs": {"a": {"type": "object", "properties": {"a": {}}, "required": ["a"]}},
        },
        ['{"a":1}', '{"a":1,"c":2}', '{"b":1}', "null"],
        ['{"a":1,"b":1}', '{"c":1}'],
    ),
    "properties that require others": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
            "additionalProperties": False,
            "dependentRequired": {"a": ["b"]},
            "dependencies": {"b": ["c"]},
        },
        ["{}", '{"c":null}', '{"b":null,"c":null}', '{"a":null,"b":null,"c":null}'],
        ['{"a":null}', '{"b":null}', '{"a":null,"b":null}', '{"a":null,"c":null}'],
    ),
    "a required property that requires others": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
            "required": ["a"],
            "dependentRequired": {"b": ["c"], "a": ["b"]},
        },
        ['{"a":null,"b":null,"c":null}'],
        ['{"a":null}', '{"a":null,"b":null}', "{}"],
    ),
    "one of schemas that may overlap is any of them": (
        {"oneOf": [string(maxLength=1), string(pattern="^a"), {"type": "null"}]},
        ['"b"', '"a"', '"ab"', "null"],
        ['"bc"', "1"],
    ),
    "one of and any of": (
        {
            "oneOf": [{"type": "integer"}, {"enum": ["x", None]}],
            "anyOf": [{"type": "null"}, {"minimum": 3}],
        },
        ["3", "null", '"x"'],
        ["1", '"y"'],
    ),
    "brackets in classes": (
        {"anyOf": [string(pattern=r"^[^[\]]+$"), string(pattern="^[!-/:-@[-`{-~]{2}$")]},
        ['"ab"', '"[~"', '"!]"'],
        ['"a["', '"]"', '"["'],
    ),
    "operators on classes in other languages": (
        string(pattern="^[a&&b~~]+[+--]$"),
        ['"a&,"', '"b~-"', '"~+"'],
        ['"a|,"', '"a."'],
    ),
    "braces that repeat nothing": (
        string(pattern=r"^{{[a-z]{1,2}}}|{\p{Lu}}$"),
        ['"{{ab}}"', '"{É}"'],
        ['"{{abc}}"', '"{a}"'],
    ),
    "a class without NUL": (string(pattern=r"^[^\0/]+$"), ['"ab"'], ['"a/b"', '"\\u0000"']),
    "a class of POSIX": (string(pattern="^[[:alpha:]]+$"), ['"ab"'], ['"a1"', '"a]"']),
    "an integer of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["1234567890123456789", "-9223372036854774784"],
        [19 * "9", 20 * "1"],
    ),
    "an integer beyond those of a double": (
        {"type": ["integer", "null"], "exclusiveMinimum": 1e16, "exclusiveMaximum": 2**60},
        ["10000000000000002", "1000000000000000000", "null"],
        ["10000000000000000", "1152921504606846976", "1"],
    ),
    "an integer under a bound beyond all integers": (
        {"type": "integer", "minimum": -1e300, "exclusiveMaximum": 1e20},
        ["1234567890123456789", "-5"],
        [20 * "1"],
    ),
    "a number under a bound beyond all numbers": (
        {"type": "number", "exclusiveMinimum": -1e20},
        ["-9007199254740992", "0.5"],
        [20 * "1", 16 * "9"],
    ),
    "a number format of Rust": ({"type": "integer", "format": "uint32"}, ["7"], ['"7"']),
}
FORMATS = {
    "date-time": (
        ["2026-11-21T10:00:00Z", "2026-11-21T10:00:00.5+01:00"],
        ["2026-11-21", "x", "2026-02-29T10:00:00Z", "2026-11-21T23:58:60Z"],
    ),
    "date": (
        ["2026-11-21", "2028-02-29", "2000-02-29"],
        ["2026-13-21", "21.11.2026", "2026-02-29", "2100-02-29", "2026-04-31"],
    ),
    "time": (["10:00:00Z"], ["25:00:00Z", "10:00", "10:00:60Z"]),
    "duration": (["P1DT2H", "P1Y2M3DT4H5M6S", "P2W"], ["1 day", "P", "PT", "P1D2W"]),
    "email": (["a.b@example.com", "a@[127.0.0.1]"], ["a@", "a b@c.d", "a..b@c.d"]),
    "hostname": (["a-b.example"], ["-a", "a_b"]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (
        ["::", "::1", "1::", "1::2", "fe80:0:0:0:0:0:0:1", "1:2:3:4:5:6:7::", "::ffff:192.168.0.1"],
        ["1::2::3", "xyz", "1:2:3", "1:2:3:4:5:6:7:8:9", "::256.1.1.1"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "uuid4": (
        ["123e4567-e89b-42d3-a456-426614174000"],
        ["123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-42d3-c456-426614174000"],
    ),
    "ipv4interface": (["10.0.0.1", "10.0.0.1/24"], ["10.0.0.1/33", "10.0.0/8"]),
    "ipv6interface": (["fe80::1/64", "::1"], ["fe80::1/129"]),
    "ipv4network": (["10.0.0.0/8", "192.168.1.0/24", "10.0.0.1/32"], ["10.0.0.1/24", "10.0.0.0/x"]),
    "ipv6network": (["fe80::/64", "2001:db8::/64", "::1/128"], ["fe80::1/64"]),
    "ipvanyaddress": (["10.0.0.1", "::1"], ["10.0.0.1/24", "x"]),
    "ipvanyinterface": (["10.0.0.1/24", "::1/64"], ["x"]),
    "ipvanynetwork": (["10.0.0.0/8", "fe80::/64"], ["10.0.0.1/8"]),
    "iri": (["https://exämple.org/ö?q=日本#é", "urn:a:b"], ["/ä", "http://a b", "x:\ue000"]),
    "uri-reference": (
        ["", "/a/b", "b/c?d#e", "//host:80/a", "#f", "?q", "a:b", "./a:b", "https://a.b/"],
        ["a b", "1:b", "http://[1::2::3]/", "%zz", "a\\\\b", "é"],
    ),
    "iri-reference": (["", "ä/ö?日#é", "https://é/"], ["a b", "1é:b"]),
    "idn-email": (["müller@example.com", "a.b@c.d"], ["@", "a b@c", "ü..b@c.d"]),
    "idn-hostname": (["a-b.example"], ["-a"]),
    "json-pointer": (["", "/", "/a~1b/0/~0"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1#", "12/a"], ["", "01", "-1", "/a"]),
    "uri-template": (
        ["http://a/{id}/b{?q,r*}{#x:3}", "", "/{+path}/é", "{a.b}"],
        ["{", "a b", "{}", "{a b}", "{^a}", "x}"],
    ),
    "uri": (
        ["https://example.com/a?b=c#d", "http://u@[::1]:80/", "urn:a:b", "mailto:a@b.c"],
        ["not a uri", "/a/b", "http:// x", "http://[1::2::3]/", "a:%zz", "https://a/\\\\b"],
    ),
}


@pytest.mark.parametrize("name", ACCEPTED_AND_REFUSED)
def test_a_schema_accepts_what_it_means(name, compiler):
    schema, accepted, refused = ACCEPTED_AND_REFUSED[name]
    compiled = compile_text(compiler, json.dumps(schema))
    assert [text for text in accepted if not accepts(compiled, text)] == []
    assert [text for text in refused if accepts(compiled, text)] == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_enforced(name, compiler):
    accepted, refused = FORMATS[name]
    compiled = compile_text(compiler, json.dumps(string(format=name)))
    assert [text for text in accepted if not accepts(compiled, f'"{text}"')] == []
    assert [text for text in refused if accepts(compiled, f'"{text}"')] == []


@pytest.mark.parametrize(
    "keyword",
    [
        *("not", "if", "then", "else", "contains", "minContains", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        *("unevaluatedItems", "contentSchema", "$dynamicRef", "$recursiveRef", "$vocabulary"),
        *("nullable", "discriminator", "divisibleBy", "extends", "disallow", "x-guidance"),
        *("minLenght", "requried", "additonalProperties", "additionalPropertys", "patternProperty"),
    ],
)
def test_a_keyword_that_is_not_enforced_or_is_misspelt_is_named_with_its_place(keyword, compiler):
    schema = {"type": "object", "properties": {"a/b": {"anyOf": [{}, {keyword: ["a"]}]}}}
    with pytest.raises(GrammarError) as refusal:
        compile_text(compiler, json.dumps(schema))
    assert repr(keyword) in str(refusal.value)
    assert "#/properties/a~1b/anyOf/1" in str(refusal.value)


def test_words_and_formats_that_json_schema_does_not_know_annotate(compiler):
    words = ("name", "note", "links", "decription", "_format", "type:", "min", "$default")
    text = {
        "type": "string",
        "maxLength": 1,
        "format": "ext-ref",
        **{word: ["a"] for word in words},
    }
    schema = {"type": "object", "properties": {"a": text}, "additionalProperties": False, "defs": 1}
    compiled = compile_text(compiler, json.dumps(schema))
    assert accepts(compiled, '{"a":"b"}')
    assert not accepts(compiled, '{"a":"bc"}')


@pytest.mark.parametrize("bound", ["1e999", "-1e999", "-1", "0.5", '"x"', "[1]", "1e300"])
@pytest.mark.parametrize("keyword", ["minItems", "maxItems"])
def test_a_bound_of_different_items_that_cannot_be_is_refused_or_idle(keyword, bound, compiler):
    text = '{"type":"array","items":{"enum":["a","b"]},"uniqueItems":true,"KEY":1}'
    with suppress(GrammarError):
        compiled = compile_text(compiler, text.replace('"KEY":1', f'"{keyword}":{bound}'))
        assert not accepts(compiled, '["a","a"]')


@pytest.mark.parametrize("types", [{"a": 1}, 3, ["integer", {}], ["null"], []])
def test_types_of_keys_that_no_key_has_are_refused(types, compiler):
    schema = {"type": "object", "propertyNames": {"type": types}}
    with pytest.raises(GrammarError, match="propertyNames"):
        compile_text(compiler, json.dumps(schema))


def test_data_and_names_may_look_like_keywords(compiler):
    schema = {
        "properties": {"not": {"const": {"if": 1}}},
        "required": ["not"],
        "examples": [{"not": 1}],
        "$defs": {"uniqueItems": True},
    }
    assert accepts(compile_text(compiler, json.dumps(schema)), '{"not":{"if":1}}')


ENDLESS_OBJECT = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "null"}},
    "required": ["b", "a"],
}
TWO_OR_MORE = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}
ENDLESS_LIST = {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}
ENDLESS_CHOICE = {"anyOf": [{"$ref": "#/$defs/x"}, {"allOf": [ENDLESS_LIST, {"minItems": 2}]}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
        {"type": "array", "items": {"$ref": "#/$defs/x"}},
        {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
    ],
)
def test_a_schema_that_may_end_is_enforced_though_another_does_not(part, compiler):
    schema = {"$ref": "#/$defs/x", "$defs": {"x": part, "unused": {"$ref": "#/$defs/unused"}}}
    compile_text(compiler, json.dumps(schema))


CLASSES = {
    r'^[^"]+$': 'a"',
    r"^[^\\]+$": "a\\",
    r'^[^<>:"/\\|?*]+$': 'a"\\',
    r'^[^]"\n]+$': 'a]"\n',
    r'^[^-"]+$': 'a-"',
    r'^[^"-]+$': 'a-"',
    r'^[^\n"]+$': 'a\n"',
}


@pytest.mark.parametrize("pattern", CLASSES)
@pytest.mark.parametrize("form", ["value", "part", "key"])
def test_what_a_class_excludes_is_not_written_with_an_escape_either(pattern, form, compiler):
    match form:
        case "value":
            schema, whole = string(pattern=pattern), "{}"
        case "part":
            schema, whole = {"allOf": [string(pattern=pattern), string(maxLength=9)]}, "{}"
        case "key":
            keys = {"patternProperties": {pattern: {"type": "null"}}}
            schema, whole = {"type": "object", **keys, "additionalProperties": False}, "{{{}:null}}"
    compiled = compile_text(compiler, json.dumps(schema))
    first, *others = CLASSES[pattern]
    assert accepts(compiled, whole.format(json.dumps(first)))
    for character in others:
        assert not accepts(compiled, whole.format(json.dumps(first + character)))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"format": 1}, "#: the format 1"),
        ({"type": "text"}, "Invalid type: text"),
        ({"properties": []}, "#/properties: must be an object"),
        ({"anyOf": {}}, "#/anyOf: must be a list"),
        ({"allOf": [1]}, "#/allOf/0: a schema is"),
        ({"items": "string"}, "#/items: a schema is"),
        ({"title": "T", "schema": {"type": "null"}}, "#: the keyword 'schema' is not supported"),
        ({"name": "f", "parameters": {}}, "#: the keyword 'name' is not supported, and no other"),
        ({"$ref": "#/$defs/x"}, "#: there is no schema at '#/\\$defs/x'"),
        ({"$ref": "#/properties", "properties": {}}, "there is no schema at '#/properties'"),
        ({"$ref": "https://example.com/x"}, "#: \\$ref must point into the schema itself"),
        ({"$ref": "#anchor", "$anchor": "anchor"}, "#: \\$ref must point into the schema itself"),
        ({"$ref": 1}, "#: \\$ref must point into the schema itself"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "^(?=a)b$"}, "look-around"),
        ({"type": "string", "pattern": r"^(a)\1$"}, "backreferences"),
        ({"type": "string", "pattern": "^a{,2}$"}, "repetition quantifier"),
        ({"type": "string", "pattern": 1}, "Expected string for 'pattern'"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum \\(5\\) is greater"),
        ({"type": "integer", "minimum": "5"}, "Expected f64 for 'minimum'"),
        ({"multipleOf": []}, "multipleOf"),
        ({"multipleOf": 0}, "invalid multiple of"),
        ({"enum": []}, "#/enum: is empty"),
        ({"properties": {"a": {"enum": []}}}, "#/properties/a/enum: is empty"),
        ({"type": "integer", "minimum": 1e20}, "#/minimum: numbers end at"),
        ({"type": "integer", "maximum": -1e300}, "#/maximum: numbers end at"),
        ({"items": {"type": "number", "exclusiveMinimum": 2**53}}, "#/items/exclusiveMinimum: num"),
        ({"minimum": 1e16}, "#/minimum: numbers end at 9007199254740992"),
        ({"enum": 1}, "enum must be an array"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
        ({"$ref": "#"}, "#: no text can complete it"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "#/properties/a: no"),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": ENDLESS_OBJECT}}, "#/\\$defs/x: no text"),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": ENDLESS_LIST}}, "#/\\$defs/x: no text"),
        (
            {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": ENDLESS_CHOICE}},
            "#/\\$defs/x\\S*: no text",
        ),
        ({**TWO_OR_MORE, "maxProperties": 1}, "minProperties > maxProperties"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema, problem, compiler):
    with pytest.raises(GrammarError, match=problem) as refusal:
        compile_text(compiler, json.dumps(schema))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [('{"type": "string"', 1, 18), ('{\n  "type": string\n}', 2, 11), ("{} {}", 1, 4), ("{", 1, 2)],
)
def test_malformed_json_is_refused_with_its_place(text, line, column, compiler):
    with pytest.raises(GrammarSyntaxError, match="not JSON") as refusal:
        compile_text(compiler, text)
    assert (refusal.value.line, refusal.value.column) == (line, column)


@pytest.mark.parametrize("text", ["[]", "false", '"x"', "1"])
def test_a_schema_is_an_object(text):
    with pytest.raises(GrammarError, match="a JSON schema is an object"):
        schema_to_lark(text)


ANY_VALUES = ('{"a":[1,{"b":null}]}', "[[],{}]", '"x"', "-1.5", "true", "999999999999999")
ENDLESS = ("1" * 20, "0." + "1" * 10, "1e400", "[" + "1" * 90 + "]", '{"a":' + "1" * 20 + "}")


@pytest.mark.parametrize(
    "text",
    [
        "true",
        " true\n",
        "{}",
        '{"title": "T", "$schema": "https://json-schema.org/draft/2020-12/schema"}',
        '{"$defs": {"x": {}}, "x-order": 1}',
        '{"$ref": "#/$defs/x", "$defs": {"x": true}}',
        '{"anyOf": [{}, {"type": "null"}]}',
    ],
)
def test_any_value_is_json_without_endless_numbers(text, compiler):
    compiled = compile_text(compiler, text)
    assert [value for value in ANY_VALUES if not accepts(compiled, value)] == []
    assert [value for value in ENDLESS if accepts(compiled, value)] == []


def test_parts_of_any_value_have_no_endless_numbers_either(compiler):
    schema = {
        "type": "object",
        "properties": {"a": {}, "b": {"type": "array"}, "c": {"type": "number"}},
        "patternProperties": {"^x": True},
    }
    compiled = compile_text(compiler, json.dumps(schema))
    digits = "1" * 20
    for key, value in (("a", digits), ("b", f"[{digits}]"), ("d", digits), ("x", digits)):
        assert not accepts(compiled, f'{{"{key}":{value}}}')
        assert accepts(compiled, f'{{"{key}":{value.replace(digits, "1")}}}')
    assert accepts(compiled, f'{{"c":{digits}}}')


def test_a_number_with_a_bound_is_not_endless(compiler):
    schema = {"type": "number", "minimum": -90.5}
    compiled = compile_text(compiler, json.dumps(schema))
    for value, is_allowed in {"59.913900123": True, "5.3333333333": False, "9" * 16: False}.items():
        assert accepts(compiled, value) == is_allowed


COMBINED = {"a": {"properties": {"x": {}, "y": True}}, "b": {"properties": {"x": {}}}}
COMBINATIONS = [
    {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
    {"properties": {"n": {}}, "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
    {"$ref": "#/$defs/a", "properties": {"x": {}}},
    {"allOf": [{"anyOf": [{"$ref": "#/$defs/a"}]}, {"properties": {"x": {"type": "array"}}}]},
]


@pytest.mark.parametrize("schema", COMBINATIONS, ids=json.dumps)
def test_definitions_with_any_value_can_be_combined(schema, compiler):
    definitions = {name: {"type": "object", **fields} for name, fields in COMBINED.items()}
    compiled = compile_text(compiler, json.dumps({**schema, "$defs": definitions}))
    assert accepts(compiled, '{"x":[]}')


def test_names_and_annotations_of_parts_restrict_nothing(compiler):
    part = {"$id": "/schemas/unknown", "id": "x", "markdownDescription": "n", "type": "integer"}
    order = {"propertyOrdering": ["n"], "errorMessage": {"type": "no"}}
    schema = {"type": "object", **order, "properties": {"n": part, "id": {"$ref": "#/$defs/n"}}}
    compiled = compile_text(compiler, json.dumps({**schema, "$defs": {"n": part}}))
    assert accepts(compiled, '{"n":1,"id":2}')
    assert not accepts(compiled, '{"id":"a"}')


@pytest.mark.parametrize("text", ['{"maximum":' + "9" * 5000 + "}", '{"a":' * 100_000])
def test_json_that_python_cannot_read_is_refused(text):
    with pytest.raises(GrammarError, match="cannot be read"):
        schema_to_lark(text)


CONTRADICTION = {"type": "string", "format": "date", "pattern": "^\\d{2}/\\d{2}/\\d{4}$"}
NO_TEXT = "no text meets its pattern, format and lengths at once"


def object_of(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


@pytest.mark.parametrize(
    ("schema", "place", "problem"),
    [
        (object_of(a=object_of(when=CONTRADICTION)), "#/properties/a/properties/when", NO_TEXT),
        (object_of(["when"], when=CONTRADICTION), "#/properties/when", NO_TEXT),
        (
            object_of(a={"type": "array", "items": string(format="date", maxLength=5)}),
            "#/properties/a/items",
            NO_TEXT,
        ),
        (object_of(a=string(pattern="^(?=a)b$")), "#/properties/a", "look-around, including"),
        (
            {**object_of(q={"$ref": "#/$defs/x"}), "$defs": {"x": object_of(t={"type": "objct"})}},
            "#/$defs/x/properties/t",
            "Invalid type: objct",
        ),
        (string(pattern="("), "#", "unclosed group"),
    ],
)
def test_a_refusal_names_the_innermost_part_that_is_at_fault(schema, place, problem, compiler):
    with pytest.raises(GrammarError) as refusal:
        Composer(compiler).composed(ReplyRule(text=json.dumps(schema)))
    assert refusal.value.problem.startswith(f"{place}: {problem}")


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"type": "integer"}}}]},
        {"$ref": "#/$defs/A", "properties": {"b": {"type": "integer"}}},
        {"allOf": [{"allOf": [{"$ref": "#/$defs/A"}]}], "properties": {"b": {"type": "integer"}}},
    ],
)
def test_an_object_of_several_parts_is_closed_together(schema, compiler):
    part = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    whole = {"$defs": {"A": part}, "type": "object", "unevaluatedProperties": False, **schema}
    compiled = compile_text(compiler, json.dumps(whole))
    texts = ['{"a":"x"}', '{"a":"x","b":1}', '{"a":"x","c":1}', '{"b":1}', '{"a":"x","b":"y"}']
    assert [text for text in texts if accepts(compiled, text)] == texts[:2]


def test_an_object_is_not_closed_by_parts_of_which_some_may_not_match(compiler):
    schema = {"anyOf": [{"properties": {"a": {}}}, {}], "unevaluatedProperties": False}
    with pytest.raises(GrammarError, match="'unevaluatedProperties' is not supported"):
        compile_text(compiler, json.dumps({"type": "object", **schema}))
