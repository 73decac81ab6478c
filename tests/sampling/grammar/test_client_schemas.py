"""Arguments that a grammar allows are valid for the tool's own schema, and are read as such."""

import json
from random import Random

import pytest
from client_schemas import CLIENT_SCHEMAS
from golden import named_calls, named_format, play, tool_format
from grammar_driver import tool_grammar
from jsonschema import Draft202012Validator
from tool_replies import FORMATS, tool
from tool_walks import TinyVocabulary, walk

from backend.output.reply import ReplySpec
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.tool_calls import writable
from backend.sampling.grammar.tool_parameters import CallRule, Parameters

ONE_CALL = CallRule(least=1, most=1, has_text=False)
DIALECTS = ("hermes_json", "qwen3_coder_xml", "minimax_m3", "gemma4", "pythonic")
WALKS = 6


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("schema", CLIENT_SCHEMAS.values(), ids=CLIENT_SCHEMAS)
def test_arguments_are_valid_for_the_schema_as_it_was_sent(name, schema):
    family, offered = FORMATS[name], tool("f", schema)
    vocabulary = TinyVocabulary(family.markers, (), family.ends)
    parameters = writable(tool_format(name), Parameters.of(offered), vocabulary)
    assert not parameters.notes
    grammar = tool_grammar(tool_format(name), [offered], ONE_CALL, vocabulary)
    compiled = GrammarCompiler(vocabulary).compile(grammar)
    spec = ReplySpec(
        format=named_format(name, family.reasoning),
        tools={"f": parameters.schema},
        prompt_tail=family.prompt_tail,
    )
    random = Random(name)
    texts = [walk(compiled, vocabulary, random) for _ in range(WALKS)]
    written = [text for text in texts if text is not None]
    assert len(written) > WALKS / 3
    for text in written:
        [(_, arguments)] = named_calls(play(spec, [text]))
        Draft202012Validator(schema).validate(json.loads(arguments))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a": {"type": "str"}}}, "12"),
        ({"properties": {"a": {"type": "STRING"}}}, "12"),
        ({"properties": {"a": {"type": "int"}}}, 12),
        ({"allOf": [{"properties": {"a": {"type": "string"}}}]}, "12"),
        ({"anyOf": [{"properties": {"a": {"type": "string"}}}, {"required": ["b"]}]}, "12"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "string"}}}, "12"),
    ],
)
def test_a_value_is_read_as_the_type_that_it_was_written_as(schema, value):
    text = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    parameters = Parameters.of(tool("f", schema))
    spec = ReplySpec(format=named_format("qwen3_coder_xml", "none"), tools={"f": parameters.schema})
    [(_, arguments)] = named_calls(play(spec, [text]))
    assert json.loads(arguments) == {"a": value}
