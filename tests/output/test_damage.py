"""Valid outputs of every format, damaged: a marker or quote dropped, doubled, swapped, or the last.

Character by character, an eighth of them are read: `pytest tests/output --hypothesis-profile=long`
reads all, and looks further.
"""

import json
import logging
import re
from itertools import chain

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_replies import FORMATS, ONE, TOOLS

from backend.core.step import FinishReason
from backend.output.reply import ReplySpec
from backend.output.tag_repair import markup_of

SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
PAIRS = [name for name, reply in FORMATS.items() if reply.two]
FIRST, SECOND = "note_add", "clock_now"
ANY_MARKER = r"</?[^<>\s]{1,40}>?|<\|[^|]*\|>|\[/?[A-Z_]+\]|\"|'|[{}\[\]]|\n"
# A text whose end is missing takes in all that follows, which the finish tells.
OPEN_ENDED = {"pythonic", "pythonic llama4", "olmo3", "olmo3 tight", "minicpm3"}

# There are fifty formats: a third of the usual examples is enough for each.
several = settings(max_examples=settings.default.max_examples // 3)

pytestmark = pytest.mark.slow


def spec_of(name):
    reply = FORMATS[name]
    return ReplySpec(
        format=golden.named_format(reply.parser or name, reply.reasoning),
        tools=SCHEMAS,
        prompt_tail=reply.prompt_tail,
    )


def places_in(text, spec):
    """Return where the markers and quotes of a text stand."""
    texts = sorted(markup_of(spec.format.tools).texts, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, texts), ANY_MARKER])
    return [found.span() for found in re.finditer(pattern, text)]


def drops_and_doubles(text, places):
    for start, end in places:
        yield start, text[:start] + text[end:]
        yield start, text[:end] + text[start:]


def played(spec, chunks, stop=FinishReason.STOP):
    completion = golden.play(spec, chunks, stop)
    calls = golden.named_calls(completion)
    return completion.content, completion.reasoning, calls, completion.finish.reason


def is_strict(arguments):
    """Tell whether arguments are an object that strict parsers of JSON take, and UTF-8."""

    def refuse(constant):
        raise ValueError(constant)

    try:
        value = json.loads(arguments, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return isinstance(value, dict)


def check(spec, text, caplog, stop=FinishReason.STOP):
    """Play a damaged reply, and return it if all is well."""
    content, reasoning, calls, finish = found = played(spec, [text], stop)
    if golden.is_sampled(text):
        assert played(spec, text, stop) == found, text
    assert all(record.levelno < logging.ERROR for record in caplog.records), text
    assert "\N{REPLACEMENT CHARACTER}" not in f"{content}{reasoning}{calls}", text
    if finish is FinishReason.TOOL_CALLS:
        assert all(is_strict(arguments) for _, arguments in calls), text
    elif calls and finish is FinishReason.STOP:
        assert not all(is_strict(arguments) for _, arguments in calls), text
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(3)
def test_one_damage_raises_nothing_and_what_is_published_is_valid(name, caplog):
    spec, reply = spec_of(name), FORMATS[name]
    for text in (reply.two or reply.one, reply.rich):
        for _, damaged in drops_and_doubles(text, places_in(text, spec)):
            check(spec, damaged, caplog)


@pytest.mark.parametrize("name", FORMATS)
def test_a_general_namespace_before_a_name_costs_no_call(name, caplog):
    spec, text = spec_of(name), FORMATS[name].one
    # Of a bare list in Python nothing is repaired, and recipients of messages are the model's.
    if name == "pythonic llama4" or spec.format.tools.name in ("harmony", "muse_spark"):
        return
    whole = played(spec, [text])
    for namespace in ("functions.", "tools.", "default_api."):
        assert check(spec, text.replace(FIRST, namespace + FIRST), caplog) == whole, namespace


@pytest.mark.parametrize("name", FORMATS)
def test_a_name_in_another_namespace_is_that_of_another_tool(name, caplog):
    spec, text = spec_of(name), FORMATS[name].one
    if name == "kimi_k2":  # The name in an id decides, whatever is around it.
        return
    for other in (f"github.{FIRST}", f"{FIRST}.list"):
        content, _, calls, finish = check(spec, text.replace(FIRST, other), caplog)
        assert (calls, finish) == ((), FinishReason.STOP), other
        assert "milk" in content
        assert other in content or spec.format.tools.owns_reply


@pytest.mark.parametrize("name", FORMATS)
def test_no_cut_makes_a_call_that_was_not_written(name, caplog):
    spec, reply = spec_of(name), FORMATS[name]
    text = reply.two or reply.one
    whole = played(spec, [text])[2]
    for _, end in places_in(text, spec):
        _, _, calls, finish = check(spec, text[:end], caplog, FinishReason.LENGTH)
        assert set(calls) <= set(whole) or finish is FinishReason.LENGTH, text[:end]
        for called, complete in zip(calls, whole, strict=False):
            assert called == complete or not is_strict(called[1]), text[:end]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(3)
def test_a_stop_makes_no_value_of_a_piece_of_markup(name):
    spec, text = spec_of(name), FORMATS[name].one
    [(_, whole)] = ONE
    for end in range(len(text)):
        content, _, calls, _ = played(spec, [text[:end]])
        for _, arguments in calls:
            assert not is_strict(arguments) or json.loads(arguments).items() <= whole.items(), end
        # Messages, and the marks of one after its calls, are read by other rules.
        is_other = spec.format.tools.owns_reply or name == "kimi_k3"
        assert not (calls and content) or is_other, text[:end]


@pytest.mark.parametrize("name", FORMATS)
def test_a_last_quote_may_be_missing(name, caplog):
    spec = spec_of(name)
    text, count = re.subn(r'("milk)", "pri": 2\}(?!, "id")', r"\1}", FORMATS[name].one)
    if count:
        found = check(spec, text, caplog)
        assert found == ("", "", ((FIRST, '{"text": "milk"}'),), FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("name", PAIRS)
def test_damage_to_one_call_costs_no_other(name, caplog):
    spec, text = spec_of(name), FORMATS[name].two
    whole = played(spec, [text])[2]
    begin, end = text.index(FIRST) + len(FIRST), text.rindex(SECOND) + len(SECOND)
    places = places_in(text, spec)
    last_value = max(place for place in (text.find("milk"), text.find("2", begin)) if place > 0)
    inside = [(start, stop) for start, stop in places if begin < start < last_value]
    after = [(start, stop) for start, stop in places if start >= end]
    tools = spec.format.tools
    # Messages without a call in them are shown as they are.
    opener = "" if tools.owns_reply else tools.opener
    for start, damaged in chain(drops_and_doubles(text, inside), drops_and_doubles(text, after)):
        content, _, calls, finish = check(spec, damaged, caplog)
        assert len(calls) == len(set(calls)) <= len(whole), damaged
        survivor = whole[0 if start >= end else 1]
        is_told = name in OPEN_ENDED and finish is FinishReason.STOP
        assert survivor in calls or is_told, damaged
        assert start >= end or not (opener and opener in content), damaged


NESTING = [
    name
    for name, reply in FORMATS.items()
    if re.search(r">\n?milk\n?<", reply.one)
    and '"|>' not in reply.one
    and name not in ("functiongemma", "kimi_k3", "muse_spark")
]


@pytest.mark.parametrize("name", NESTING)
def test_a_text_may_hold_whole_calls_of_its_own_format(name):
    spec, text = spec_of(name), FORMATS[name].one
    for value in (text, f"See:\n{text}\nand {text} there"):
        content, _, calls, finish = played(spec, [text.replace("milk", value)])
        assert [json.loads(arguments) for _, arguments in calls] == [{"text": value, "pri": 2}]
        assert (content, finish) == ("", FinishReason.TOOL_CALLS)
        assert played(spec, text.replace("milk", value)) == (content, "", calls, finish)


@pytest.mark.parametrize("name", sorted({*NESTING} & {*PAIRS}))
def test_a_call_that_a_text_only_begins_costs_nothing_after_it(name):
    spec, text = spec_of(name), FORMATS[name].two
    value = f"As in {text[: text.index('milk')]} so"
    content, _, calls, finish = played(spec, [text.replace("milk", value)])
    assert [called for called, _ in calls] == [FIRST, SECOND]
    assert json.loads(calls[0][1]) == {"text": value, "pri": 2}
    assert (content, finish) == ("", FinishReason.TOOL_CALLS)
    assert played(spec, text.replace("milk", value)) == (content, "", calls, finish)


# Up to the value, a number.
TAGS = r'<[^<>{]*[">=|]pri\b[^\d{(]*[>|]'
MENTIONING = [name for name, reply in FORMATS.items() if re.search(rf"milk\D*{TAGS}", reply.one)]


@pytest.mark.parametrize("name", MENTIONING)
@pytest.mark.parametrize("around", ["First {} then", "a\n{}\nb", '"{}"'])
def test_a_text_may_mention_the_tags_of_a_later_argument(name, around):
    spec, text = spec_of(name), FORMATS[name].one
    tags = re.search(TAGS, text)[0]
    first = tags[: tags.index(">", tags.index("pri")) + 1]
    for mention in (first, tags, f"{tags}x</parameter>", f"{tags}x</arg_value>"):
        value = around.format(mention)
        content, _, calls, finish = played(spec, [text.replace("milk", value)])
        assert [json.loads(arguments) for _, arguments in calls] == [{"text": value, "pri": 2}]
        assert (content, finish) == ("", FinishReason.TOOL_CALLS)
        assert played(spec, text.replace("milk", value)) == (content, "", calls, finish)


DRIFTS = {
    "a comment": (r'(: "milk")', r"\1 /* all */"),
    "a comment to the end of the line": (r'("milk"), ("pri")', r"\1, // all\n\2"),
    "a semicolon": (r'"milk", "pri"', '"milk"; "pri"'),
    "a bracket too many": (r'("pri": 2)\}', r"\1]}"),
    "a comma too many": (r'("pri": 2)\}', r"\1,}"),
    "a brace after the arguments": (r'("pri": 2\}(?!, "id"))', r"\1}"),
    "an equals sign": (r'"pri": 2', '"pri" = 2'),
    "a key without quotes": (r'"pri": 2', "pri: 2"),
    "an f-string": (r"text=(.)milk\1", r"text=f\1milk\1"),
    "joined strings": (r"text=(.)milk\1", "text='mi' r\"lk\""),
    "a space for a sign": (r"<(\w+)=(note_add|text)>(?!\{)", r"<\1 \2>"),
    "an attribute for a sign": (r"<(\w+)=(note_add|text)>(?!\{)", r'<\1 name="\2">'),
    "a tag named after its key": (
        r'<(?:parameter=text|parameter name="text")>\n?milk\n?</parameter>',
        "<text>milk</text>",
    ),
    "wrapped arguments": (r'(\{"text": "milk", "pri": 2\})', r'{"arguments": \1}'),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_call_that_drifts_has_the_arguments_that_were_meant(drift, caplog):
    pattern, other = DRIFTS[drift]
    found = [name for name, reply in FORMATS.items() if re.search(pattern, reply.one)]
    for name in found:
        spec, text = spec_of(name), FORMATS[name].one
        damaged = re.sub(pattern, other, text)
        content, _, calls, finish = check(spec, damaged, caplog)
        assert played(spec, damaged) == (content, "", calls, finish), damaged
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [*ONE], damaged
        assert (content, finish) == ("", FinishReason.TOOL_CALLS), damaged
    assert found


@pytest.mark.parametrize("name", PAIRS)
def test_an_undeclared_argument_is_one_like_any_other(name):
    spec, reply = spec_of(name), FORMATS[name]
    text = reply.two.replace("pri", "lang", 1) if "pri" in reply.two else reply.two
    text = text.replace("</pri>", "</lang>", 1)
    _, _, calls, finish = played(spec, [text])
    assert finish is FinishReason.TOOL_CALLS
    assert [called for called, _ in calls] == [FIRST, SECOND]
    assert json.loads(calls[0][1]).keys() == {"text", "lang"}


@pytest.mark.parametrize("name", FORMATS)
def test_several_damages_raise_nothing_and_what_is_published_is_valid(name, caplog):
    spec, reply = spec_of(name), FORMATS[name]
    text = reply.two or reply.one
    places = places_in(text, spec)
    markers = sorted({text[start:end] for start, end in places})
    swaps = st.dictionaries(
        st.sampled_from(places), st.sampled_from(["", *markers]), min_size=1, max_size=3
    )

    @several
    @given(swaps, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    def swapped(others, stop):
        damaged, last = "", 0
        for (start, end), other in sorted(others.items()):
            damaged += text[last:start] + other
            last = end
        check(spec, damaged + text[last:], caplog, stop)

    swapped()


BROKEN = {
    '{"b": "he said "yes" ok"}': {"b": 'he said "yes" ok'},
    '{"b": "true}': {"b": "true"},
    '{"b": "true"': {"b": "true"},
    '{"b": true, // all\n"c": 1,}': {"b": True, "c": 1},
}
TAGGED = [name for name, reply in FORMATS.items() if re.search(r'>\{"b": true', reply.rich)]


@pytest.mark.parametrize("name", [*TAGGED, "qwen3_coder_xml"])
@pytest.mark.parametrize("written", BROKEN)
def test_an_object_between_tags_is_mended(name, written):
    text = FORMATS[name].rich.replace('{"b": true, "y-z": null}', written)
    found = played(spec_of(name), [text])
    assert played(spec_of(name), text) == found
    _, _, [(_, arguments)], finish = found
    assert (json.loads(arguments)["opts"], finish) == (BROKEN[written], FinishReason.TOOL_CALLS)


# Code and examples of calls, as files and commands contain them.
CODE = ("clock_now()", "x = clock_now(); y", "[clock_now()]", "clock_now{}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("code", CODE)
@pytest.mark.one_in(3)
def test_code_in_a_value_of_a_damaged_call_is_no_call(name, code):
    spec, one = spec_of(name), FORMATS[name].one
    text = one.replace("milk", json.dumps(code)[1:-1] if '"milk"' in one else code, 1)
    if played(spec, [text])[3] is not FinishReason.TOOL_CALLS:
        return
    places = places_in(text, spec)
    cut = [text[:end] for _, end in places]
    for damaged in (*cut, *(damaged for _, damaged in drops_and_doubles(text, places))):
        _, _, calls, _ = played(spec, [damaged])
        assert {called for called, _ in calls} <= {FIRST}, damaged
