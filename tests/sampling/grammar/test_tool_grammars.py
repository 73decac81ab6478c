"""Tool grammars accept calls of offered tools as families write them, and no other calls."""

import json
import re
from functools import cache
from itertools import product
from random import Random

import pytest
from golden import named_calls, named_format, play, tool_format
from grammar_driver import tool_grammar
from jsonschema import Draft202012Validator
from tool_replies import FORMATS, TOOLS, tool
from tool_walks import TinyVocabulary, is_whole, walk

from backend.formats.format import NO_TOOLS
from backend.formats.registry import TOOL_FORMATS
from backend.output.reply import ReplySpec
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.tool_parameters import CallRule

REQUIRED = CallRule(least=1, most=4, has_text=False)
ONE_CALL = CallRule(least=1, most=1, has_text=False)
AUTO = CallRule(most=4)
# Models of these families are told by their markers, which are tokens therefore.
ALWAYS_TOKENS = (
    "harmony",
    "mistral",
    "pythonic",
    "longcat",
    "llama3_json",
    "kimi_k3",
    "gigachat3 token",
)
CASES = [
    pytest.param(name, has_tokens, id=f"{name}-{'tokens' if has_tokens else 'text'}")
    for name, family in FORMATS.items()
    for has_tokens in (True, False)
    if has_tokens or not (family.markers and name.startswith(ALWAYS_TOKENS))
]
WALKS = 12
SCHEMAS = {offered.name: offered.parameters for offered in TOOLS}


@cache
def vocabulary_of(name, has_tokens):
    family = FORMATS[name]
    markers = family.markers if has_tokens else ()
    words = (() if has_tokens else family.markers) + tuple(_words(family, markers))
    return TinyVocabulary(markers, words, family.ends if has_tokens else ())


def _words(family, markers):
    """Yield pieces of replies that cross whatever they are made of, and their closing tags."""
    between_markers = "|".join(map(re.escape, markers)) or "$"
    for text in (family.one, family.rich):
        for part in re.split(between_markers, text):
            yield from (part[start : start + 9] for start in range(0, len(part), 7))
            yield from re.findall(r"\n?</[^<>]+>\n?|\w+>\n?", part)


@cache
def compiled(name, has_tokens, rule):
    return compile_tools(name, vocabulary_of(name, has_tokens), rule, TOOLS)


def compile_tools(name, vocabulary, rule, tools):
    grammar = tool_grammar(format_of(name), tools, rule, vocabulary)
    return GrammarCompiler(vocabulary).compile(grammar)


def format_of(name):
    return tool_format(FORMATS[name].parser or name)


def reply_spec(name):
    family = FORMATS[name]
    return ReplySpec(
        format=named_format(family.parser or name, family.reasoning),
        tools=SCHEMAS,
        prompt_tail=family.prompt_tail,
    )


def parsed(name, text):
    """Return content and calls of a reply, as our own parser reads it."""
    completion = play(reply_spec(name), [text])
    return completion.content, tuple(
        (called, json.loads(arguments)) for called, arguments in named_calls(completion)
    )


@pytest.mark.parametrize(("name", "has_tokens"), CASES)
def test_what_the_family_writes_is_allowed_and_parsed(name, has_tokens):
    vocabulary = vocabulary_of(name, has_tokens)
    for text, calls in FORMATS[name].replies:
        for rule in (REQUIRED, AUTO):
            assert is_whole(compiled(name, has_tokens, rule), text, vocabulary), text
        assert parsed(name, text) == ("", calls)


@pytest.mark.parametrize(("name", "has_tokens"), CASES)
def test_where_a_call_is_required_there_is_nothing_else(name, has_tokens):
    family, vocabulary = FORMATS[name], vocabulary_of(name, has_tokens)
    for rule in (REQUIRED, ONE_CALL):
        grammar = compiled(name, has_tokens, rule)
        for text in ("", "Saving it.", f"Saving it.{family.one}", f"{family.one}Done."):
            assert not is_whole(grammar, text, vocabulary)
    two = family.two or family.one
    assert is_whole(compiled(name, has_tokens, ONE_CALL), two, vocabulary) is not bool(family.two)


@pytest.mark.parametrize(("name", "has_tokens"), CASES)
def test_a_wrong_call_is_refused_even_among_text(name, has_tokens):
    family, vocabulary = FORMATS[name], vocabulary_of(name, has_tokens)
    faults = [("note_add", "note_del"), ("text", "test"), ("2", "12"), ("2", "milk"), ("2", "-1")]
    for (valid, invalid), rule in product(faults, (REQUIRED, AUTO)):
        # The suffix of a marker has the same digit.
        text = re.sub(rf"(?<!:61){valid}", invalid, family.one)
        assert not is_whole(compiled(name, has_tokens, rule), text, vocabulary), text


@pytest.mark.parametrize(("name", "has_tokens"), CASES)
def test_arguments_come_in_any_order(name, has_tokens):
    """JSON has none, and a host that knows none sorts them by name."""
    text, vocabulary = FORMATS[name].turned, vocabulary_of(name, has_tokens)
    for rule in (REQUIRED, AUTO):
        assert is_whole(compiled(name, has_tokens, rule), text, vocabulary), text
    [(called, arguments)] = parsed(name, text)[1]
    expected = list(parsed(name, FORMATS[name].one)[1][0][1].items())
    assert (called, list(arguments.items())) == ("note_add", expected[::-1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "has_tokens"), CASES)
@pytest.mark.parametrize("rule", [REQUIRED, AUTO], ids=["required", "auto"])
@pytest.mark.one_in(3)
def test_whatever_the_grammar_allows_is_parsed_into_valid_calls(name, has_tokens, rule):
    random = Random(f"{name} {has_tokens} {rule.least}")
    grammar, vocabulary = compiled(name, has_tokens, rule), vocabulary_of(name, has_tokens)
    finished = 0
    opening, _, _ = FORMATS[name].one.partition("text")
    # The end of a value counts together with the text after it.
    tails = re.split("milk|(?<!:61)2", FORMATS[name].one)[1:]
    for number in range(WALKS):
        prefix = opening if rule.has_text and number % 2 else ""
        text = walk(grammar, vocabulary, random, prefix=prefix, tails=tails)
        if text is None:
            continue
        finished += 1
        content, calls = parsed(name, text)
        assert rule.least <= len(calls) <= rule.most, text
        assert rule.has_text or not content, text
        for called, arguments in calls:
            Draft202012Validator(SCHEMAS[called]).validate(arguments)
    assert finished >= WALKS / 2


def test_there_may_be_text_before_between_and_behind_calls():
    grammar, vocabulary = compiled("hermes_json", True, AUTO), vocabulary_of("hermes_json", True)
    one = FORMATS["hermes_json"].one
    calls = "Now: ".join([one] * AUTO.most)
    assert is_whole(grammar, f"Saving.\n{calls}\nDone.", vocabulary)
    assert not is_whole(grammar, f"{calls}{one}", vocabulary)
    assert is_whole(grammar, "No <call>, no </tool_call>.", vocabulary)


def test_a_call_begins_with_the_marker_only_and_never_spelled_out():
    matcher = compiled("hermes_json", True, AUTO).matcher()
    assert all(map(matcher.consume, b"A <tool_call"))
    assert not matcher.consume(ord(">"))


def test_text_may_hold_other_markers():
    vocabulary = TinyVocabulary(("<tool_call>", "</tool_call>", "<box>", "<a>"))
    grammar = tool_grammar(format_of("hermes_json"), TOOLS, AUTO, vocabulary)
    compiled_grammar = GrammarCompiler(vocabulary).compile(grammar)
    assert is_whole(compiled_grammar, "<a>A <box>here</tool_call><a>", vocabulary)
    assert is_whole(compiled_grammar, f"<a>A <box>{FORMATS['hermes_json'].one}", vocabulary)


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        # An answer may be JSON about names; a call without markers there is a lapse.
        ("hermes_json", '{"name": "Ann"}', True),
        ("hermes_json", "Tools stand in <tools> tags.", True),
        ("llama3_json", '{"answer": 42}', True),
        ("llama3_json", 'In JSON: {"name": 1}', True),
        ("llama3_json", ' {"name": "Ann"}', False),
        ("pythonic llama4", "[note](link)", True),
        ("pythonic llama4", "[1, f(2)]", True),
        ("pythonic llama4", "[f(2)]", False),
    ],
)
def test_an_answer_that_only_looks_like_a_call_is_text(name, text, is_allowed):
    grammar, vocabulary = compiled(name, False, AUTO), vocabulary_of(name, False)
    assert is_whole(grammar, text, vocabulary) is is_allowed


def test_a_call_without_its_wrapper_is_a_call_among_text_only():
    name = "qwen3_coder_xml"
    bare = "<function=note_add>\n<parameter=text>\nmilk\n</parameter>\n</function>"
    vocabulary = vocabulary_of(name, True)
    assert is_whole(compiled(name, True, AUTO), f"Saving.\n{bare}", vocabulary)
    assert not is_whole(compiled(name, True, AUTO), bare.replace("text", "test"), vocabulary)
    assert not is_whole(compiled(name, True, REQUIRED), bare, vocabulary)


def test_a_tool_whose_name_begins_like_another_ones():
    tools = (tool("note", {}), tool("note_add", {}), tool("note.add v2", {}), tool("notiz_ö", {}))
    for name, family in FORMATS.items():
        vocabulary = vocabulary_of(name, True)
        grammar = compile_tools(name, vocabulary, REQUIRED, tools)
        for offered in tools:
            text = family.none.replace("clock_now", offered.name)
            assert is_whole(grammar, text, vocabulary), text


def test_a_format_without_a_grammar_has_none():
    vocabulary = TinyVocabulary()
    assert tool_grammar(NO_TOOLS, TOOLS, AUTO, vocabulary) is None


@pytest.mark.parametrize("tools", TOOL_FORMATS, ids=lambda tools: tools.name)
def test_a_format_has_a_grammar_or_a_reason_why_not(tools):
    assert (not tools.frames) == bool(tools.without_grammar)
