"""Tools that a template refuses get the nearest form that it takes."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_tools import NAME, ODD_TOOLS, PURPOSE, WELL_FORMED, tool, with_property, with_root

from backend.model.text.renderer import RenderError
from backend.model.text.tool_forms import (
    ToolForms,
    all_in_words,
    first_of_each,
    in_words,
    one_type_each,
    plain_root,
    tidied,
)


class Strict:
    """A template that takes only the tools it knows, and counts how often it is run."""

    def __init__(self, takes):
        self.takes = takes
        self.count = 0

    def __call__(self, turns, tools, _options):
        self.count += 1
        shown = [self.shown(each) for each in tools or ()]
        return "\n".join([*shown, *(turn["content"] for turn in turns)])

    def shown(self, each):
        try:
            if self.takes(each["function"]):
                return json.dumps(each)
        except (KeyError, AttributeError) as error:
            raise RenderError("failed") from error
        raise RenderError("refused")


def fitted(takes, *tools):
    return ToolForms(Strict(takes)).fitted(tools)


def properties(each):
    return each["function"]["parameters"]["properties"]


@pytest.mark.parametrize("each", [WELL_FORMED, *ODD_TOOLS.values()])
def test_a_tool_that_a_template_takes_stays_as_it_is(each):
    assert fitted(lambda _: True, each) == [each]


def test_a_missing_description_is_empty():
    found = fitted(lambda each: isinstance(each["description"], str), tool(), tool(description=5))
    assert found == [tool(description=""), tool(description="5")]


def test_missing_parameters_are_an_object_without_properties():
    def takes(each):
        return isinstance(each["parameters"]["properties"], dict)

    for each in (tool(description="d"), with_root(), with_root(type="object")):
        (found,) = fitted(takes, each)
        assert found["function"]["parameters"] == {"type": "object", "properties": {}}
        assert found["function"]["description"] == each["function"]["description"]


def test_only_the_property_that_is_refused_changes():
    def takes(each):
        return "parameters" not in each or all(
            isinstance(schema.get("type"), str)
            for schema in each["parameters"]["properties"].values()
        )

    (found,) = fitted(takes, with_property({"anyOf": [{"type": "null"}, {"type": "integer"}]}))
    assert properties(found) == {
        "odd_one": {"type": "integer"},
        "plain_one": properties(WELL_FORMED)["plain_one"],
    }


def test_a_list_of_types_becomes_a_choice_which_loses_nothing():
    def takes(each):
        return '"type": [' not in json.dumps(each)

    (found,) = fitted(takes, with_property({"type": ["string", "null"], "description": "d"}))
    kinds = [{"type": "string"}, {"type": "null"}]
    assert properties(found)["odd_one"] == {"description": "d", "anyOf": kinds}


def test_at_last_a_property_is_described_in_words():
    def takes(each):
        shown = each.get("parameters", {}).get("properties", {})
        return all(schema.keys() <= {"type", "description"} for schema in shown.values())

    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "description": "An object."}
    (found,) = fitted(takes, with_property(schema))
    assert properties(found)["odd_one"]["type"] == "object"
    described = properties(found)["odd_one"]["description"]
    assert described == f"An object.\nJSON schema: {json.dumps(schema)}"


def test_at_last_all_parameters_are_described_in_words():
    (found,) = fitted(lambda each: not each.get("parameters", {}).get("properties"), WELL_FORMED)
    assert json.dumps(WELL_FORMED["function"]["parameters"]) in found["function"]["description"]
    assert found["function"]["description"].startswith(PURPOSE)


def test_properties_that_a_template_loses_are_found():
    def shown(each):
        names = each["function"].get("parameters", {}).get("properties", {})
        return f"{each['function']['name']} {list(names)}"

    template = Strict(None)
    template.shown = shown
    found = ToolForms(template).fitted([with_root(anyOf=[{"properties": {"odd_one": True}}])])
    assert list(properties(found[0])) == ["odd_one"]


class Typed(Strict):
    """A template that shows types, descriptions, values and inner names, and nothing else."""

    def __init__(self):
        super().__init__(None)

    def shown(self, each):
        function = each["function"]
        properties = function.get("parameters", {}).get("properties", {})
        texts = [self.spelled(name, schema) for name, schema in properties.items()]
        return "\n".join([function["name"], function.get("description", ""), *texts])

    def spelled(self, name, schema):
        inner = schema.get("properties", {})
        fields = [self.spelled(key, each) for key, each in inner.items()]
        kind = schema.get("type") if isinstance(schema.get("type"), str) else "any"
        values = schema.get("enum", []) if kind != "any" else []
        return " ".join([name, kind, schema.get("description", ""), *map(str, values), *fields])


ADDRESS = {"type": "object", "properties": {"zipcode": {"type": "string"}}}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "form"),
    [
        ({"$ref": "#/$defs/Address"}, ADDRESS),
        ({"$ref": "#/$defs/Address", "description": "d"}, {**ADDRESS, "description": "d"}),
        ({"anyOf": [{"$ref": "#/$defs/Address"}, NULL]}, {"anyOf": [ADDRESS, NULL]}),
        ({"anyOf": [ADDRESS, NULL]}, {"anyOf": [ADDRESS, NULL]}),
        ({"type": ["string", "null"], "enum": ["fast", None]}, None),
        ({"const": "fast"}, None),
        ({"type": "array", "items": ADDRESS}, None),
    ],
)
def test_names_and_values_inside_a_property_are_shown_whatever_a_template_knows(schema, form):
    given = with_property(schema)
    given["function"]["parameters"]["$defs"] = {"Address": ADDRESS}
    template = Typed()
    (found,) = ToolForms(template).fitted([given])
    text = template.shown(found)
    assert ("zipcode" in text) or ("fast" in text)
    if form is not None and "anyOf" not in form:
        assert properties(found)["odd_one"] == form
    # A template that shows all of it gets the tool as it is.
    assert fitted(lambda _: True, given) == [given]


def test_a_schema_that_contains_itself_is_shown_once():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "text": {}}}
    given = with_property({"$ref": "#/$defs/Node"})
    given["function"]["parameters"]["$defs"] = {"Node": node}
    (found,) = ToolForms(Typed()).fitted([given])
    inner = {"next": {"type": "object"}, "text": {}}
    assert properties(found)["odd_one"] == {"type": "object", "properties": inner}


def test_what_a_template_never_shows_is_not_missed():
    template = Strict(None)
    template.shown = lambda each: each["function"]["name"]
    each = with_root(anyOf=[{"properties": {"odd_one": True}}])
    assert ToolForms(template).fitted([each]) == [each]


def test_a_template_that_refuses_every_form_gets_the_tool_as_it_is():
    assert fitted(lambda _: False, WELL_FORMED) == [WELL_FORMED]


def test_a_tool_is_rendered_once():
    template = Strict(lambda _: True)
    forms = ToolForms(template)
    forms.fitted([WELL_FORMED])
    count = template.count
    forms.fitted([WELL_FORMED, copy.deepcopy(WELL_FORMED)])
    assert template.count == count


def test_references_that_lead_in_circles_or_nowhere_end():
    loop = {"$ref": "#/$defs/A"}
    each = with_root(
        anyOf=[loop, {"$ref": "gone"}, {"$ref": "#/x/y"}],
        **{"$defs": {"A": {"properties": {"odd_one": {}}, "allOf": [loop, loop]}}},
    )
    assert list(properties(plain_root(each))) == ["odd_one"]


KEYS = st.sampled_from(
    [
        *("type", "properties", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum"),
        *("required", "additionalProperties", "description", "const", "default", "not", "name"),
    ]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["string", "object", "array", "any", "int", "#/$defs/A", "#", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_every_form_of_any_schema_is_a_tidy_one(schema):
    tidy = tidied(schema)
    assert tidied(tidy) == tidy
    single = one_type_each(tidy)
    assert not isinstance(single.get("type"), list)
    assert "anyOf" not in first_of_each(single) or "anyOf" in json.dumps(single)
    words = in_words(schema)
    assert json.dumps(schema, ensure_ascii=False) in words["description"]


@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_any_root_becomes_an_object_with_named_properties(schema):
    before = copy.deepcopy(schema)
    plain = plain_root(with_root(**schema))["function"]["parameters"]
    assert plain["type"] == "object"
    assert all(isinstance(each, dict) for each in plain["properties"].values())
    assert all_in_words(with_root(**schema))["function"]["name"] == NAME
    assert schema == before
