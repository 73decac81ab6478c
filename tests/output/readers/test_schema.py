import pytest

from backend.output.readers.typed_values import UNKNOWN, ParameterTypes

DEFINITIONS = {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"const": 1}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"enum": ["a", 1, None, 0.5, True, [], {}]}, set()),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"enum": [1]}]}, {"string", "integer"}),
        ({"oneOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, {"string", "null"}),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
    ],
)
def test_types_are_found_wherever_a_schema_tells_them(schema, types):
    found = ParameterTypes({"properties": {"x": schema}, "$defs": DEFINITIONS}).of("x")
    everything = {"string", "integer", "null", "number", "boolean", "array", "object"}
    assert found == (types or everything)


@pytest.mark.parametrize(
    "schema",
    [{}, None, "string", {"$ref": "#/$defs/loop"}, {"$ref": "#/nowhere"}, {"$ref": "http://x"}],
)
def test_a_schema_that_tells_nothing_does_no_harm(schema):
    types = ParameterTypes({"properties": {"x": schema}, "$defs": DEFINITIONS})
    assert types.of("x") == types.of("y") == UNKNOWN


def test_a_property_that_one_way_excludes_has_the_type_of_another():
    ways = [{"properties": {"x": False, "y": {}}}, {"properties": {"x": {"type": "integer"}}}]
    types = ParameterTypes({"anyOf": ways, "properties": {"part": {"anyOf": ways}, "z": False}})
    assert types.of("x") == types.inside("part").of("x") == {"integer"}
    assert not types.is_declared("z")


def test_a_name_is_declared_or_the_schema_is_open():
    closed = {"properties": {"x": {}}}
    assert ParameterTypes(closed).is_declared("x")
    assert not ParameterTypes(closed).is_declared("y")
    assert ParameterTypes(closed | {"additionalProperties": True}).is_declared("y")
    assert ParameterTypes({}).is_declared("y")


def test_the_parts_of_an_argument_have_types_too():
    types = ParameterTypes(
        {
            "properties": {"x": {"properties": {"y": {"$ref": "#/$defs/z"}}}, "l": {"items": {}}},
            "$defs": {"z": {"type": "array", "items": {"type": "integer"}}},
        }
    )
    assert list(types.names) == ["x", "l"]
    assert types.inside("x").of("y") == {"array"}
    assert types.inside("x").inside("y").of("item") == {"integer"}
    assert types.inside("l").of("item") == types.inside("nothing").of("item") == UNKNOWN
