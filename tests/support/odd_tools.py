"""Tools as clients send them: parts left out, schemas that templates do not expect."""

from typing import Any

NAME, PURPOSE = "fetch_page", "Reads_one_page"


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": NAME, **function}}


def with_property(schema: Any, **root: Any) -> dict[str, Any]:
    properties = {"odd_one": schema, "plain_one": {"type": "string", "description": "A text"}}
    parameters = {"type": "object", "properties": properties, **root}
    return tool(description=PURPOSE, parameters=parameters)


def with_root(**parameters: Any) -> dict[str, Any]:
    return tool(description=PURPOSE, parameters=parameters)


WELL_FORMED = with_property(
    {"type": "array", "items": {"type": "integer"}, "description": "Numbers"}, required=["odd_one"]
)
_ONE = {"odd_one": {"type": "string"}}
_PROPERTIES = {
    "a list of types": {"type": ["string", "null"]},
    "three types": {"type": ["string", "number", "array"]},
    "true": True,
    "false": False,
    "anything": {},
    "null": None,
    "the name of a type": "string",
    "names of types": ["string", "null"],
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"x": True}}]},
    "a reference": {"$ref": "#/$defs/A"},
    "an enum of all types": {"enum": [1, 2.5, None, True, "a", [1], {"a": 1}]},
    "a constant": {"const": 5},
    "a type that is a number": {"type": 5},
    "a type that is null": {"type": None},
    "any": {"type": "any"},
    "a type of Python": {"type": "dict"},
    "items that are true": {"type": "array", "items": True},
    "items by place": {"type": "array", "items": [{"type": "string"}]},
    "items of two types": {"type": "array", "items": {"type": ["string", "null"]}},
    "inner true": {"type": "object", "properties": {"inner": True}},
    "inner null": {"type": "object", "properties": None},
    "additional": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    "a description of null": {"type": "string", "description": None},
    "a description that is a list": {"type": "string", "description": ["a"]},
    "a default of null": {"type": "string", "default": None},
    "an enum of null": {"type": "string", "enum": None},
    "an enum that is text": {"type": "string", "enum": "abc"},
    "required as a boolean": {"type": "string", "required": True},
}
_ROOTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "only a type": {"type": "object"},
    "properties of null": {"type": "object", "properties": None},
    "properties that are true": {"type": "object", "properties": True},
    "properties in a list": {"type": "object", "properties": [{"name": "odd_one"}]},
    "no type": {"properties": _ONE},
    "two types": {"type": ["object", "null"], "properties": _ONE},
    "anyOf": {"anyOf": [{"type": "object", "properties": _ONE}]},
    "a reference": {
        "$ref": "#/$defs/A",
        "$defs": {"A": {"type": "object", "properties": _ONE}},
    },
    "required of null": {"type": "object", "properties": _ONE, "required": None},
    "required that is true": {"type": "object", "properties": _ONE, "required": True},
    "required that is text": {"type": "object", "properties": _ONE, "required": "odd_one"},
    "required of numbers": {"type": "object", "properties": _ONE, "required": [1]},
    "required and not declared": {"type": "object", "properties": _ONE, "required": ["zz"]},
}
ODD_TOOLS: dict[str, dict[str, Any]] = {
    "no description": tool(parameters={"type": "object", "properties": _ONE}),
    "no parameters": tool(description=PURPOSE),
    "only a name": tool(),
    "a description that is a number": tool(description=5),
    "a description that is an object": tool(description={"text": PURPOSE}),
    "strict": {**WELL_FORMED, "function": {**WELL_FORMED["function"], "strict": True}},
    **{f"parameters: {name}": with_root(**root) for name, root in _ROOTS.items()},
    **{
        f"a property: {name}": with_property(schema, **{"$defs": {"A": {"type": "object"}}})
        for name, schema in _PROPERTIES.items()
    },
}
