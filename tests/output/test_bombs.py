"""Inputs that once took exponential or quadratic time: each test ends at once, or never."""

import golden
import pytest
from tool_replies import FORMATS, tool

from backend.core.step import FinishReason
from backend.errors import GrammarError
from backend.output.readers.build import make_reader
from backend.output.readers.patterns import ATTRIBUTES, Pattern, fixed
from backend.output.readers.typed_values import ParameterTypes
from backend.output.replay import cut_evenly
from backend.output.reply import ReplySpec
from backend.output.router import Router
from backend.sampling.grammar.tool_parameters import Parameters, kinds

TOOLS = {"note_add": {"type": "object", "properties": {"text": {"type": "string"}}}}

# A bomb takes hours; everything else takes a second or less.
pytestmark = pytest.mark.timeout(60)


def played(name, text, chunks=1):
    spec = ReplySpec(format=golden.named_format(name, "none"), tools=TOOLS)
    return golden.play(spec, cut_evenly(text, chunks), FinishReason.STOP)


def layered(layers, parts=2):
    """Return definitions of which each combines the next one with itself."""
    definitions = {
        f"d{layer}": {"anyOf": [{"$ref": f"#/$defs/d{layer + 1}"}] * parts}
        for layer in range(layers)
    }
    return definitions | {f"d{layers}": {"type": "string"}}


@pytest.mark.parametrize("attribute", [' a="b"', " a='b'", ' a="b c=d"', " a = 'b"])
def test_no_attribute_is_read_in_two_ways(attribute):
    tag = Pattern((fixed("<invoke"), ATTRIBUTES, fixed(">")), name_key="a")
    many = attribute * (360 // len(attribute))
    assert tag.match(f"<invoke{many}").end < 0
    assert tag.match(f"<invoke{many}<").end < 0
    assert tag.match(f"<invoke{many[:100]}!").end < 0


def test_an_attribute_may_lack_either_quote():
    tag = Pattern((fixed("<invoke"), ATTRIBUTES, fixed(">")), name_key="name")
    for text in ('"f"', "'f'", "f", '"f', "f'"):
        assert tag.match(f'<invoke name={text} kind="a b">').name == "f"


def test_white_space_in_the_head_of_a_call_is_passed_once():
    for name in ("solar_open", "mistral", "kimi_k2", "deepseek_v3"):
        opener = golden.tool_format(name).openers[-1]
        text = f"{opener}{' ' * 390}note_add{' ' * 390}!" * 4
        assert played(name, text).tool_calls == ()


def test_schemas_that_combine_each_other_have_their_kinds_once():
    schema = {"$defs": layered(30), "properties": {"x": {"$ref": "#/$defs/d0"}}}
    parameters = Parameters.of(tool("f", schema))
    found = kinds("#/properties/x", {"$ref": "#/$defs/d0"}, parameters)
    assert [kind.pointer for kind in found] == ["#/$defs/d30"]


def test_too_many_schemas_are_refused():
    schema = {"properties": {"x": {"anyOf": [{"type": "null"}] * 2000}}}
    with pytest.raises(GrammarError, match="schemas are combined"):
        kinds("#/properties/x", schema["properties"]["x"], Parameters("f", schema))


def test_types_of_schemas_that_combine_each_other_are_found_once():
    schema = {"$defs": layered(30, 10), "properties": {"x": {"$ref": "#/$defs/d0"}}}
    types = ParameterTypes(schema)
    assert types.of("x") == {"string"}
    assert list(types.inside("x").names) == []


def test_the_types_of_a_wide_schema_are_a_sample():
    parts = [{"type": "array", "anyOf": [{"type": "null"}] * 1000} for _ in range(1000)]
    wide = {"anyOf": parts}
    assert ParameterTypes({"properties": {"x": wide}}).of("x") == {"array"}


BLOCK_CHARS = 1 << 16
DAMAGED = '<tool_call>{"name": note_add, '
BOMBS = {
    "quotes that end no string": DAMAGED + '"a": "' + '" a' * (BLOCK_CHARS // 4),
    "objects that never end": DAMAGED + '{"a ' * (BLOCK_CHARS // 5),
    "braces": DAMAGED + "{" * (BLOCK_CHARS - 100),
    "backslashes": DAMAGED + '"a": "' + "\\" * (BLOCK_CHARS // 2) + '"' * 1000,
    "a word": DAMAGED + "a" * (BLOCK_CHARS - 100),
    "words before brackets": DAMAGED + "note_add  ( " * (BLOCK_CHARS // 13),
    "white space": DAMAGED + " " * (BLOCK_CHARS - 100) + "a",
    "names": DAMAGED + "note_add {" * (BLOCK_CHARS // 11),
    "dots": DAMAGED + "a." * (BLOCK_CHARS // 3),
}
TAGGED_BOMBS = {
    "ends": "</parameter>" * (BLOCK_CHARS // 13),
    "white space in a value": " " * (BLOCK_CHARS // 2) + "a",
    "begun tags": "<parameter" * (BLOCK_CHARS // 11),
    "begun ends": "</" * (BLOCK_CHARS // 3),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("name", ["hermes_json", "apertus", "pythonic"])
@pytest.mark.one_in(3)
def test_a_damaged_block_is_read_in_bounded_time(name, bomb):
    opener, closer = golden.tool_format(name).openers[0], golden.tool_format(name).closers[0]
    text = bomb.replace("<tool_call>", opener) + closer
    assert played(name, text, chunks=1000).finish.reason in FinishReason


@pytest.mark.parametrize("bomb", TAGGED_BOMBS.values(), ids=TAGGED_BOMBS)
@pytest.mark.parametrize("name", ["qwen3_coder_xml", "minimax_m2", "minimax_m3", "glm4"])
def test_damaged_tags_are_read_in_bounded_time(name, bomb):
    reply = FORMATS[name]
    begin = reply.one.partition("milk")[0]
    text = f"{begin}{bomb}<oops{begin}{bomb}{golden.tool_format(name).closers[0]}"
    assert played(name, text, chunks=1000).finish.reason in FinishReason


def test_a_damaged_call_that_is_too_long_is_not_collected():
    text = '<tool_call>{"name": "note_add", "arguments": {"text": "a"; ' + "b" * (BLOCK_CHARS * 2)
    after = '</tool_call>\n<tool_call>{"name": "note_add", "arguments": {"text": "c"}}</tool_call>'
    found = played("hermes_json", text + after, chunks=1000)
    assert [call.arguments for call in found.tool_calls] == ['{"text": "a', '{"text": "c"}']
    assert (found.content, found.finish.reason) == ("", FinishReason.STOP)


class CountingReader:
    """A reader that notes how much text it is fed."""

    def __init__(self, reader, lengths):
        self._reader, self._lengths = reader, lengths

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def feed(self, text):
        self._lengths.append(len(text))
        return self._reader.feed(text)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("begin", ["I will call.\n", "As in\n```\n"], ids=["thought", "fence"])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_where_none_is_expected_cost_no_more_than_their_length(name, begin, truncated):
    reply, lengths = FORMATS[name], []
    in_thought = "`" not in begin
    reasoning = reply.reasoning if in_thought else "none"
    output_format = golden.named_format(reply.parser or name, reasoning)
    start = output_format.reasoning.start if in_thought else ""
    router = Router(
        output_format,
        tools=TOOLS,
        prompt_tail=reply.prompt_tail + start,
        make_reader=lambda *given: CountingReader(make_reader(*given), lengths),
    )
    text = begin + f"text {reply.one}\n" * 200
    for chunk in cut_evenly(text, 200):
        router.feed(chunk)
    router.finish(truncated=truncated)
    assert sum(lengths) < 24 * len(text)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("between", ["\n", " [\n"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_repeated_opener_costs_no_more_than_its_length(name, between):
    reply, lengths = FORMATS[name], []
    output_format = golden.named_format(reply.parser or name, "none")
    router = Router(
        output_format,
        tools=TOOLS,
        prompt_tail=reply.prompt_tail,
        make_reader=lambda *given: CountingReader(make_reader(*given), lengths),
    )
    text = f"{output_format.tools.opener}{between}" * 400
    for chunk in cut_evenly(text, 200):
        router.feed(chunk)
    router.finish(truncated=False)
    assert sum(lengths) < 100 * len(text)
