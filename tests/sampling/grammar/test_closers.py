"""A value may contain its own closer: a value that a grammar allows is read back exactly.

More of it: `pytest tests/sampling/grammar/test_closers.py --hypothesis-profile=long`.
"""

import json
import re
from functools import cache
from random import Random

import pytest
from golden import named_calls, named_format, play, tool_format
from grammar_driver import tool_grammar
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tool_replies import FORMATS, tool
from tool_walks import TinyVocabulary, is_whole

from backend.formats.closing import TagEnds, quote_limits
from backend.formats.dialects import ARGUMENTS, Literals, split_at
from backend.output.reply import ReplySpec
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.tool_calls import call_site
from backend.sampling.grammar.tool_parameters import CallRule

ONE_CALL = CallRule(least=1, most=1, has_text=False)
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {"first": TEXT, "other": TEXT, "text": TEXT},
    "required": ["first"],
}
OFFERED = tool("f", SCHEMA)


def _dsml(between, block):
    begin, end = f"<｜DSML｜{between}", f"</｜DSML｜{between}"
    return (
        f'{begin}{block}>\n{begin}invoke name="f">\n',
        f'{begin}parameter name="KEY" string="true">VALUE{end}parameter>\n',
        f"{end}invoke>\n{end}{block}>",
    )


def _pairs(prefix="", suffix="", line="\n"):
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    return f"<{key}KEY</{key}{line}<{value}VALUE</{value}{line}"


def _hunyuan(suffix=""):
    return (
        f"<tool_calls{suffix}>\n<tool_call{suffix}>f<tool_sep{suffix}>\n",
        _pairs(suffix=suffix),
        f"</tool_call{suffix}>\n</tool_calls{suffix}>",
    )


# The text before the arguments, an argument, and the text after them.
CALLS = {
    "qwen3_coder_xml": (
        "<tool_call>\n<function=f>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n",
        "<parameter=KEY>VALUE</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "glm4": ("<tool_call>f\n", _pairs(), "</tool_call>"),
    "glm4 compact": ("<tool_call>f", _pairs(line=""), "</tool_call>"),
    "longcat": ("<longcat_tool_call>f\n", _pairs("longcat_"), "</longcat_tool_call>"),
    "hunyuan_v3": _hunyuan(),
    "hunyuan_v3_opensource": _hunyuan(":opensource"),
    "deepseek_dsml v3.2": _dsml("", "function_calls"),
    "deepseek_dsml v4": _dsml("", "tool_calls"),
    "deepseek_dsml v4.1": _dsml(" ", "calls"),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>STEP"f">'.replace(
            "STEP", "<steptml:invoke name="
        ),
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    ),
    "muse_spark": (
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n',
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        "</atem:invoke>\n</atem:function_calls>",
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">',
        "]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>",
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>',
        '<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
    ),
    "minicpm5": ('<function name="f">', '<param name="KEY">VALUE</param>', "</function>"),
    "gemma4": ("<|tool_call>call:f{", 'KEY:<|"|>VALUE<|"|>', "}<tool_call|>"),
    "functiongemma": (
        "<start_function_call>call:f{",
        "KEY:<escape>VALUE<escape>",
        "}<end_function_call>",
    ),
}
LITERAL = {"gemma4": '<|"|>', "functiongemma": "<escape>"}
# Their grammars are only used where these markers are tokens.
WITH_TOKENS = ("longcat", "kimi_k3")
KINDS = [(n, t) for n in CALLS for t in (True, False) if t or n not in WITH_TOKENS]
WORDS = (
    "",
    "a",
    " ",
    "\n",
    "x y",
    "<",
    "</",
    ">",
    "é",
    '"',
    "}",
    ",",
    "]",
    "</b>",
    "text",
    "text:",
)
every_kind = pytest.mark.parametrize(("name", "has_tokens"), KINDS)
# There are thirty of these: a third of the usual examples is enough for each.
several = settings(max_examples=settings.default.max_examples // 3)


@cache
def vocabulary_of(name, has_tokens):
    family = FORMATS[name]
    markers = (*family.markers, "<think>", "<|tag|>") if has_tokens else ()
    return TinyVocabulary(markers, (), family.ends if has_tokens else ())


def format_of(name):
    return tool_format(FORMATS[name].parser or name)


@cache
def compiled(name, has_tokens):
    vocabulary = vocabulary_of(name, has_tokens)
    grammar = tool_grammar(format_of(name), [OFFERED], ONE_CALL, vocabulary)
    return GrammarCompiler(vocabulary).compile(grammar)


@cache
def marks_of(name):
    """Return the marks of a format: whole, without their ends, and joined."""
    _, argument, end = CALLS[name]
    argument = argument.replace("KEY", "text")
    opened, closed = argument.split("VALUE")
    return (
        "VALUE".join((opened, closed)),
        opened,
        closed,
        closed.strip(),
        closed.strip()[:-1],
        end,
    )


@cache
def limits_of(name):
    """Return the limits of a value, by the rule that reader and grammar share."""
    begin = CALLS[name][0]
    frame = next(
        f for f in format_of(name).frames if begin.startswith(f.opener.removeprefix("\n\n"))
    )
    after = split_at(frame.call or frame.dialect.call, ARGUMENTS)[1]
    site = call_site(frame, format_of(name), after)
    if isinstance(frame.dialect, Literals):
        return quote_limits(frame.dialect, site.reading, site.opener)
    return TagEnds.of(site.reading, frame.dialect).limits(frame.dialect, site.opener, after)


def written(name, values):
    """Return a call with these texts."""
    begin, argument, end = CALLS[name]
    arguments = [argument.replace("KEY", key).replace("VALUE", v) for key, v in values.items()]
    return begin + ("," if name in LITERAL else "").join(arguments) + end


def read(name, chunks):
    family = FORMATS[name]
    spec = ReplySpec(
        format=named_format(family.parser or name, family.reasoning),
        tools={OFFERED.name: SCHEMA},
        prompt_tail=family.prompt_tail,
    )
    completion = play(spec, chunks)
    return completion.content, [(n, json.loads(a)) for n, a in named_calls(completion)]


def chunks_of(text, seed):
    random = Random(seed)
    places = sorted(random.sample(range(len(text) + 1), min(6, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def same(name, reply):
    """Return a reply as replies are compared.

    A quote of Gemma's may mean a quotation mark, and whitespace between tags means nothing.
    """
    return re.sub(r">\s+<", "><", reply.replace(LITERAL.get(name, "\0"), '"'))


def begins_with_tag(name, key, text):
    """Tell whether a text begins with the tag of its own argument, with or without blanks."""
    opened = CALLS[name][1].partition("VALUE")[0].replace("KEY", key).strip()
    return name not in LITERAL and bool(opened) and text.lstrip().startswith(opened)


def texts(name):
    parts = st.sampled_from([*WORDS, *marks_of(name)])
    return st.lists(parts, max_size=7).map("".join)


@pytest.mark.slow
@every_kind
@several
@given(data=st.data())
def test_what_the_grammar_allows_is_read_as_it_was_written(name, has_tokens, data):
    some = texts(name)
    values = data.draw(st.fixed_dictionaries({"first": some}, optional={"text": some}))
    reply, seed = written(name, values), data.draw(st.integers(0, 99))
    if is_whole(compiled(name, has_tokens), reply, vocabulary_of(name, has_tokens)):
        # An argument's tag that is there twice is a slip of the model's.
        assume(not any(begins_with_tag(name, key, text) for key, text in values.items()))
        content, [(called, found)] = read(name, chunks_of(reply, seed))
        # Some text holds arguments in the format's own notation: then it is these.
        assert (content, called) == ("", "f")
        assert same(name, written(name, found)) == same(name, reply)


@pytest.mark.slow
@every_kind
@several
@given(data=st.data())
def test_the_grammar_refuses_what_readers_could_not_tell_apart_and_no_more(name, has_tokens, data):
    value = data.draw(texts(name))
    limits = limits_of(name)
    ends = FORMATS[name].ends if has_tokens else ()
    if name == "minicpm5" or limits.found_in(value) or any(end in value for end in ends):
        return
    if has_tokens and limits.markers_decide and re.search(_before_a_marker(name), value):
        return
    if not has_tokens and LITERAL.get(name, "\0") in value:
        return
    values = {"first": value, "text": "x"}
    reply = written(name, values)
    assert is_whole(compiled(name, has_tokens), reply, vocabulary_of(name, has_tokens)), value
    content, [(called, found)] = read(name, [reply])
    assert (content, called, same(name, found["first"])) == ("", "f", same(name, value))


def _before_a_marker(name):
    """Return a pattern of a closer right before any token that is a marker."""
    markers = "|".join(map(re.escape, vocabulary_of(name, True).markers))
    closers = "|".join(re.escape(str(first)) for first, *_ in limits_of(name).inside)
    return rf"({closers})\s*</?({markers})|({closers})\s*({markers})"


@every_kind
def test_a_value_may_contain_its_own_closer(name, has_tokens):
    if name == "minimax_m3" or (name in LITERAL and not has_tokens):
        return
    closer = LITERAL.get(name) or CALLS[name][1].partition("VALUE")[2].strip()
    value = f"a{closer}b {closer} c\n{closer}d"
    if name == "minicpm5":
        value = f"<![CDATA[{value}]]>"
    reply = written(name, {"first": value, "text": value})
    assert is_whole(compiled(name, has_tokens), reply, vocabulary_of(name, has_tokens))
    plain = value.removeprefix("<![CDATA[").removesuffix("]]>")
    assert read(name, [reply]) == ("", [("f", {"first": plain, "text": plain})])


@pytest.mark.parametrize("has_text", [True, False])
def test_a_constant_that_only_a_lapse_cannot_hold_is_held(has_text):
    name, value = "qwen3_coder_xml", "</parameter>\n</function>\n."
    schema = {"type": "object", "properties": {"text": {"const": value}}, "required": ["text"]}
    vocabulary = vocabulary_of(name, True)
    rule = CallRule(least=int(not has_text), most=1, has_text=has_text)
    grammar = tool_grammar(format_of(name), [tool("f", schema)], rule, vocabulary)
    held = GrammarCompiler(vocabulary).compile(grammar)
    assert is_whole(held, written(name, {"text": value}), vocabulary)
    assert not is_whole(held, written(name, {"text": "x"}), vocabulary)
    lapse = written(name, {"text": "x"}).replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    assert is_whole(held, lapse, vocabulary) == has_text


NESTED = {
    "type": "object",
    "properties": {"data": {"type": "object", "additionalProperties": TEXT}, "text": TEXT},
    "required": ["data"],
}
# Their objects are elements, or in the format's own quotes.
IN_TAGS = [name for name in CALLS if name not in (*LITERAL, "minimax_m3")]


def written_with_json(name, data):
    """Return a call with an object as JSON, which tags with types tell."""
    begin, argument, end = CALLS[name]
    typed = argument.replace('string="true"', 'string="false"').replace('"string"', '"object"')
    data = json.dumps(data, ensure_ascii=False)
    first = typed.replace("KEY", "data").replace("VALUE", data)
    return begin + first + argument.replace("KEY", "text").replace("VALUE", "x") + end


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TAGS)
@several
@given(data=st.data())
def test_strings_in_json_contain_any_tags(name, data):
    strings = st.dictionaries(texts(name), texts(name), min_size=1, max_size=3)
    value = data.draw(strings)
    reply, seed = written_with_json(name, value), data.draw(st.integers(0, 99))
    if name not in WITH_TOKENS:
        vocabulary = vocabulary_of(name, False)
        assert is_whole(holding_json(name), reply, vocabulary)
    spec = ReplySpec(
        format=named_format(FORMATS[name].parser or name, FORMATS[name].reasoning),
        tools={"f": NESTED},
        prompt_tail=FORMATS[name].prompt_tail,
    )
    for chunks in (chunks_of(reply, seed), [reply]):
        completion = play(spec, chunks)
        [(_, arguments)] = named_calls(completion)
        assert (completion.content, json.loads(arguments)) == ("", {"data": value, "text": "x"})


@cache
def holding_json(name):
    vocabulary = vocabulary_of(name, False)
    grammar = tool_grammar(format_of(name), [tool("f", NESTED)], ONE_CALL, vocabulary)
    return GrammarCompiler(vocabulary).compile(grammar)
