"""Tool schemas as people send them: broken in parts, of other drafts, or hard to enforce."""

STRING = {"type": "string"}
_DEEP: dict = {"type": "string"}
for _ in range(60):
    _DEEP = {"type": "object", "properties": {"a": _DEEP}, "required": ["a"]}

# Values of a property.
PARTS = {
    "a type of Python's": {"type": "int"},
    "several types of Python's": {"type": ["str", "float", "bool", "dict", "list", "date"]},
    "any": {"type": "any"},
    "a type in capitals": {"type": "STRING", "format": "enum", "enum": ["a", "b"]},
    "an object in capitals": {"type": "OBJECT", "properties": {"x": {"type": "INTEGER"}}},
    "a generic type": {"type": "List[str]"},
    "a number for a type": {"type": 5},
    "no types": {"type": []},
    "an object for a type": {"type": {"a": 1}},
    "text for a minimum": {"type": "integer", "minimum": "1"},
    "text for a length": {"type": "string", "minLength": "1", "maxLength": None},
    "a fraction for a length": {"type": "string", "minLength": 1.5},
    "a negative length": {"type": "string", "maxLength": -1},
    "a number for a pattern": {"type": "string", "pattern": 5},
    "looking ahead": {"type": "string", "pattern": "^(?!x)"},
    "looking behind": {"type": "string", "pattern": "(?<=a)b"},
    "a word boundary": {"type": "string", "pattern": "\\bx\\b"},
    "a reference back": {"type": "string", "pattern": "(a)\\1"},
    "a pattern that is none": {"type": "string", "pattern": "(["},
    "a pattern with flags": {"type": "string", "pattern": "/^a$/i"},
    "an escape of JavaScript": {"type": "string", "pattern": "\\cA[^]"},
    "a pattern of surrogates": {"type": "string", "pattern": "[\\uD800-\\uDBFF]"},
    "an anchor inside": {"type": "string", "pattern": "a$b|^c"},
    "a pattern beside a length": {"type": "string", "pattern": "^a$", "minLength": 3},
    "overlapping choices": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "overlapping objects": {
        "oneOf": [
            {"type": "object", "properties": {"x": STRING}},
            {"type": "object", "properties": {"y": STRING}},
        ]
    },
    "a negation": {"not": {"type": "string"}},
    "a condition": {"type": "object", "if": {"required": ["x"]}, "then": {"required": ["y"]}},
    "dependencies": {"type": "object", "dependentRequired": {"x": ["y"]}},
    "pattern properties": {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}},
    "bad pattern properties": {"type": "object", "patternProperties": {"(": {}, "(?=a)": {}}},
    "names of properties": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "a number of properties": {"type": "object", "minProperties": 1, "maxProperties": 2},
    "more than the declared": {"type": "object", "properties": {"x": {}}, "minProperties": 3},
    "a unique list": {"type": "array", "uniqueItems": True, "contains": {"const": 1}},
    "a multiple": {"type": "number", "multipleOf": 0.01},
    "no multiple": {"type": "number", "multipleOf": 0},
    "a large multiple": {"type": "integer", "multipleOf": 123456789},
    "an unknown format": {"type": "string", "format": "uri-reference"},
    "a format of another type": {"type": "string", "format": "int32"},
    "a number for a format": {"type": "string", "format": 1},
    "nullable": {"type": "string", "nullable": True},
    "a nullable choice": {"nullable": True, "anyOf": [{"type": "integer"}, STRING]},
    "a false schema": False,
    "a true schema": True,
    "no schema": None,
    "text for a schema": "string",
    "a list for a schema": [STRING],
    "null for what is required": {"type": "object", "properties": {"x": {}}, "required": None},
    "a bool for what is required": {"type": "string", "required": True},
    "a number in what is required": {"type": "object", "required": ["x", 5]},
    "a required name not declared": {"type": "object", "properties": {"x": {}}, "required": ["y"]},
    "a required name not allowed": {
        "type": "object",
        "properties": {"x": {}},
        "required": ["y"],
        "additionalProperties": False,
    },
    "null for properties": {"type": "object", "properties": None},
    "a list for properties": {"type": "object", "properties": [{"name": "x"}]},
    "null for a choice": {"enum": None},
    "an empty choice": {"type": "string", "enum": []},
    "text for a choice": {"type": "string", "enum": "a"},
    "a choice of another type": {"type": "string", "enum": [1, 2]},
    "a choice twice": {"type": "string", "enum": ["a", "a"]},
    "a large choice": {"type": "string", "enum": [f"value {number}" for number in range(3000)]},
    "a mixed choice": {"enum": ["1", 1, None, True, [1], {"x": 1}]},
    "a constant": {"const": None},
    "a list for items": {"type": "array", "items": [STRING, {"type": "integer"}]},
    "a bool for items": {"type": "array", "items": True},
    "no items": {"type": "array", "items": False},
    "text for items": {"type": "array", "items": "string"},
    "text for more properties": {"type": "object", "additionalProperties": "x"},
    "a schema for more properties": {"type": "object", "additionalProperties": {"type": "int"}},
    "a dangling reference": {"$ref": "#/$defs/Nowhere"},
    "a remote reference": {"$ref": "https://example.com/schema.json"},
    "a number for a reference": {"$ref": 5},
    "a reference to all": {"$ref": "#"},
    "a reference to a neighbour": {"$ref": "#/properties/b"},
    "a reference beside others": {"$ref": "#/$defs/D", "description": "d", "maxLength": 3},
    "a reference to itself": {"$ref": "#/$defs/Loop"},
    "a reference to a list of itself": {"$ref": "#/$defs/Tree"},
    "a reference without an end": {"$ref": "#/$defs/Endless"},
    "a reference in another draft": {"$ref": "#/definitions/D"},
    "a reference into a definition": {"$ref": "#/$defs/Tree/properties/name"},
    "an anchor": {"$ref": "#named"},
    "a dynamic reference": {"$dynamicRef": "#named"},
    "definitions inside": {"$defs": {"In": STRING}, "$ref": "#/$defs/In"},
    "exclusive as in draft 4": {"type": "number", "minimum": 3, "exclusiveMinimum": True},
    "exclusive without a bound": {"type": "number", "exclusiveMaximum": False},
    "a minimum above the maximum": {"type": "integer", "minimum": 5, "maximum": 3},
    "a length above the other": {"type": "string", "minLength": 5, "maxLength": 2},
    "more items than allowed": {"type": "array", "minItems": 5, "maxItems": 2},
    "no integer between": {"type": "integer", "minimum": 1.2, "maximum": 1.8},
    "bounds of JavaScript": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    "bounds of 64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**64},
    "a huge bound": {"type": "number", "minimum": -1e300, "exclusiveMaximum": 1e308},
    "a huge length": {"type": "string", "maxLength": 10**12, "minLength": 0},
    "many items": {"type": "array", "items": STRING, "minItems": 10**5},
    "deep nesting": _DEEP,
    "schemas for all": {"allOf": [{"type": "string"}, {"minLength": 2}, {"$ref": "#/$defs/D"}]},
    "closed schemas for all": {
        "allOf": [
            {"type": "object", "properties": {"x": {}}, "additionalProperties": False},
            {
                "type": "object",
                "properties": {"y": {}},
                "required": ["y"],
                "additionalProperties": False,
            },
        ]
    },
    "no schemas for all": {"allOf": []},
    "a broken choice": {"anyOf": [STRING, None, 5]},
    "no choice": {"anyOf": {}},
    "a base beside a choice": {
        "type": "object",
        "properties": {"x": STRING, "y": STRING},
        "anyOf": [{"required": ["x"]}, {"required": ["y"]}],
    },
    "an unknown keyword": {"type": "string", "minLenght": 3, "ui:widget": "text", "optional": True},
    "annotations": {
        "type": "string",
        "title": "T",
        "default": None,
        "examples": [1],
        "deprecated": True,
        "x-order": 1,
    },
}
_DEFINITIONS = {
    "D": STRING,
    "Loop": {"$ref": "#/$defs/Loop"},
    "Endless": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/Endless"}},
        "required": ["x"],
    },
    "Tree": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "$anchor": "named"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
        },
    },
}


def around(part, **fields):
    """Return the schema of a tool with this part as a property."""
    return {
        "type": "object",
        "properties": {"a": part, "b": {"type": "integer"}},
        "$defs": _DEFINITIONS,
        **fields,
    }


BASE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
MORE = {"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]}
# Whole schemas of tools.
ROOTS = {
    "nothing": {},
    "null for properties": {"type": "object", "properties": None},
    "a list for properties": {"type": "object", "properties": []},
    "null for what is required": {"type": "object", "properties": {"x": {}}, "required": None},
    "text for what is required": {"type": "object", "properties": {"x": {}}, "required": "x"},
    "only what is required": {"type": "object", "required": ["x"]},
    "a type of Python's": {"type": "dict", "properties": {"x": {"type": "str"}}},
    "a type in capitals": {"type": "OBJECT", "properties": {"x": {"type": "STRING"}}},
    "a number for a type": {"type": 5, "properties": {"x": STRING}},
    "object or null": {"type": ["object", "null"], "properties": {"x": STRING}},
    "no type": {"properties": {"x": STRING}},
    "a reference": {"$ref": "#/$defs/Base", "$defs": {"Base": BASE}},
    "a reference beside others": {"$ref": "#/$defs/Base", "$defs": {"Base": BASE}, **MORE},
    "a reference and a base": {"$defs": {"Base": BASE}, "allOf": [{"$ref": "#/$defs/Base"}, MORE]},
    "a dangling reference": {"$ref": "#/$defs/Base"},
    "a reference to itself": {"$ref": "#"},
    "any of": {"anyOf": [BASE, MORE]},
    "any of beside a base": {**BASE, "anyOf": [MORE, {"required": ["z"]}]},
    "one of with a tag": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "x": STRING}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "y": STRING}, "required": ["k"]},
        ]
    },
    "any of with null": {"anyOf": [BASE, {"type": "null"}]},
    "a condition": {**BASE, "if": {"required": ["x"]}, "then": {"required": ["y"]}, "else": False},
    "a negation": {**BASE, "not": {"required": ["z"]}},
    "pattern properties": {"type": "object", "patternProperties": {"^x": STRING}},
    "a number of properties": {**BASE, "minProperties": 3, "maxProperties": 1},
    "open": {"type": "object", "additionalProperties": True},
    "open with a schema": {"type": "object", "additionalProperties": {"type": "integer"}},
    "text for more properties": {**BASE, "additionalProperties": "no"},
    "of a server": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/tool",
        "title": "Tool",
        **BASE,
        "additionalProperties": False,
    },
    "a schema of an unknown draft": {"$schema": 5, "$id": [], **BASE},
    "a choice": {"enum": [{"x": 1}]},
    "many optional": {
        "type": "object",
        "properties": {f"p{number}": STRING for number in range(1200)},
    },
    "unknown keywords": {**BASE, "strict": True, "discriminator": {"propertyName": "x"}},
}
# No arguments fit these.
UNFIT = {
    "false for what is required": {"properties": {"x": False}, "required": ["x"]},
    "an array": {"type": "array"},
    "text": {"type": "string"},
    "nothing for all": {"allOf": [{"type": "object"}, {"type": "string"}]},
    "no choice": {"anyOf": [False, False]},
    "a choice of texts": {"enum": ["x"]},
}
SCHEMAS = {
    **{f"part: {name}": around(part) for name, part in PARTS.items()},
    **{f"root: {name}": root for name, root in ROOTS.items()},
}
REQUIRED = [around(part, required=["a"]) for part in PARTS.values() if part is not False]
