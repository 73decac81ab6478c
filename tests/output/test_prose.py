"""Prose about calls is prose: no mark of any format costs a byte, and none invents a call."""

import random

import golden
import pytest

from backend.core.step import FinishReason
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.output.replay import cut_randomly
from backend.output.reply import ReplySpec
from backend.output.reply_format import OutputFormat, opens_in_reasoning

TOOLS = {"w": {"type": "object", "properties": {"content": {"type": "string"}}}}
TOOLS["Bash"] = {"type": "object", "properties": {"command": {"type": "string"}}}
THOUGHTS = {one.name: one for one in REASONING_FORMATS}
OWN_THOUGHTS = {
    "apertus": "apertus_inner",
    "cohere": "cohere_think",
    "functionary": "none",
    "gemma4": "gemma4_channel",
    "harmony": "harmony",
    "inkling": "inkling_thinking",
    "json_list": "hunyuan_answer",
    "kimi_k3": "xtml_think",
    "longcat": "longcat_think",
    "minimax_m3": "mm_think",
    "mistral": "mistral_think",
    "muse_spark": "muse",
    "seed_oss": "seed_think",
    "solar_open": "solar_think",
}
# The head of a message that the prompt, or the reply itself, has before the text of these.
TAILS = {
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "muse_spark": "<|start|>assistant to=user<|message|>",
}
TO_ALL = {"functionary": "all\n"}
PROSE = (
    "To call it, write {} in the text.",
    "The mark is {}",
    'It writes "{}" there.',
    "Marks ({}) are used, and **{}** too.",
    "Marks:\n- {} opens\n* {} does not\n",
    "1. First {} then\n2) Second: {} and on\n",
    "Write `{}` in the text.",
    "Write ``{}`` in the text.",
    "See:\n```\n{}\n```\nDone.",
    "See:\n~~~xml\n{}\n~~~\nDone.",
    "See:\n\n    {}\n    x\n\nDone.",
    "See:\n\n\t{}\n\nDone.",
    "- See:\n\n  {}\n\nDone.",
    "See:\n> {} x\n> y\n\nDone.",
)
JSON = (
    '{{"a": "x {} y"}}',
    '["{}", 1]',
    '[1, {{"b": ["{}"]}}]',
    'So:\n```json\n{{"a": "{}"}}\n```\n',
)
# Tokens of the frames of messages are real wherever they may be.
FRAMED = ("harmony", "muse_spark")


def formats():
    for tools in TOOL_FORMATS:
        if tools.readings:
            name = OWN_THOUGHTS.get(tools.name, "think")
            yield OutputFormat(THOUGHTS[name], tools)


FORMATS = list(formats())
for_each_format = pytest.mark.parametrize("pair", FORMATS, ids=lambda pair: pair.tools.name)


def marks_of(pair):
    """Return the marks of a format, and openers with a name but nothing else of a call."""
    tools = pair.tools
    marks = (*pair.reasoning.marks, *tools.openers, *tools.closers, *tools.leaks, *tools.tokens)
    heads = [
        opener + name
        for opener in tools.openers
        for name in ("w", "w>", '"w">', ' name="w">', "Bash> opens a call, <parameter=command>")
    ]
    # A mark that begins with a line break is one only after it.
    return [mark for mark in dict.fromkeys((*marks, *heads)) if mark == mark.strip("\n")]


def played(pair, text, *, lots):
    tail, to_all = TAILS.get(pair.tools.name, ""), TO_ALL.get(pair.tools.name, "")
    tail = ">>>" if to_all else tail
    spec = ReplySpec(format=pair, tools=TOOLS, prompt_tail=tail)
    yield golden.play(spec, [to_all + text])
    if golden.is_sampled(pair.tools.name, text):
        yield golden.play(spec, cut_randomly(to_all + text, str(lots.random())))


@for_each_format
def test_a_mark_in_prose_is_prose(pair):
    lots = random.Random(pair.name)
    for prose in PROSE:
        for mark in marks_of(pair):
            if pair.tools.name in FRAMED and mark in pair.markers and "`" not in prose:
                continue
            text = prose.replace("{}", mark)
            for reply in played(pair, text, lots=lots):
                assert (reply.content, reply.reasoning) == (text, ""), (mark, prose)
                assert not reply.tool_calls, (mark, prose)
                assert reply.finish.reason is FinishReason.STOP


@for_each_format
def test_a_mark_in_a_string_of_json_is_data(pair):
    lots = random.Random(pair.name)
    calls = ['{"name": "w", "arguments": {}}', "w</tool_call>", "w<arg_key>content</arg_key>"]
    calls.append("[{'name': 'w', 'arguments': {}}]")
    for template in JSON:
        for mark in (*marks_of(pair), *(o + call for o in pair.tools.openers for call in calls)):
            if pair.tools.name == "harmony" and "<|channel|>" in mark:
                continue
            text = template.format(mark.replace('"', '\\"').replace("\n", "\\n"))
            for reply in played(pair, text, lots=lots):
                assert (reply.content, reply.reasoning) == (text, ""), (mark, template)
                assert not reply.tool_calls, (mark, template)


@for_each_format
def test_a_mark_in_a_thought_is_thought(pair):
    reasoning = pair.reasoning
    if pair.tools.name in FRAMED or not reasoning.starts:
        return
    lots = random.Random(pair.name)
    for mark in marks_of(pair):
        if mark in (*reasoning.ends, *reasoning.notes):
            continue
        for prose in ("I could write {} here.", "Use `{}` then.", "So:\n{}\nok"):
            thought = prose.replace("{}", mark)
            text = f"{reasoning.start}{thought}{reasoning.end}Done."
            for reply in played(pair, text, lots=lots):
                assert (reply.content, reply.reasoning) == ("Done.", thought), mark
                assert not reply.tool_calls, mark


@for_each_format
@pytest.mark.one_in(3)
def test_a_call_after_prose_is_a_call(pair):
    lots = random.Random(pair.name)
    for case in golden.cases():
        spec, calls = case.spec, case.tool_calls
        is_call_alone = calls and not (case.content or case.reasoning)
        is_marked = case.text.startswith(spec.format.tools.openers)
        is_lead = case.text.startswith(spec.format.tools.leads or ("\0",))
        if spec.format.tools is not pair.tools or not is_call_alone or not is_marked or is_lead:
            continue
        if pair.tools.owns_reply or opens_in_reasoning(spec.format, spec.prompt_tail):
            continue
        for before in ("Let me check.", "Let me check. ", "Let me check: ", "So:\n", "1. a\n2. "):
            text = before + case.text
            for chunks in ([text], cut_randomly(text, str(lots.random()))):
                reply = golden.play(spec, chunks, case.stop)
                assert golden.named_calls(reply) == calls, (case.case_id, before)
                assert reply.content.strip() == before.strip(), (case.case_id, before)


@pytest.mark.parametrize(
    "head",
    [
        "Here <function=Bash> opens ",
        "Here <function=w in the ",
        "Here <function= in ",
        'Here "<function=w>" is ',
        "Here <tool_call>w and ",
    ],
)
def test_a_sentence_about_a_call_is_not_held_back(head):
    pair = golden.named_format("qwen3_coder_xml", "think")
    text = f"{head}a call, <parameter=command> holds the value and this goes on"
    shown = ""
    for position, (deltas, _) in enumerate(
        golden.stream(ReplySpec(format=pair, tools=TOOLS), text)
    ):
        shown += "".join(delta.text for delta in deltas)
        if position >= len(head):
            assert len(text[: position + 1]) - len(shown) <= len("<parameter=")
    assert shown == text


def test_a_whole_call_in_code_is_a_quotation():
    call = "<tool_call>\n{}<function=Bash>\n{}<parameter=command>\n{}ls\n{}</parameter>\n"
    call += "{}</function>\n{}</tool_call>"
    pair = golden.named_format("qwen3_coder_xml", "think")
    for before, indent in (
        ("The format:\n\n    ", "    "),
        ("- So:\n\n  ", "  "),
        ("Hi\n> ", "> "),
    ):
        text = before + call.replace("{}", indent) + "\n\nThat is all."
        for chunks in ([text], text):
            reply = golden.play(ReplySpec(format=pair, tools=TOOLS), chunks)
            assert (reply.content, reply.tool_calls) == (text, ())
    text = "Ok:\n\n" + call.replace("{}", "")
    reply = golden.play(ReplySpec(format=pair, tools=TOOLS), [text])
    assert golden.named_calls(reply) == (("Bash", '{"command": "ls"}'),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", 'Ok: [TOOL_CALLS]\'Bash[ARGS]{"command": "ls"}'),
        (
            "command_r_plus",
            'Ok: Action:\n````json\n[{"tool_name": "Bash", "parameters": {"command": "ls"}}]```',
        ),
    ],
)
def test_a_damaged_call_after_words_is_read_however_it_is_cut(name, text):
    pair = golden.named_format(name, "none")
    for chunks in ([text], text, cut_randomly(text, "7")):
        reply = golden.play(ReplySpec(format=pair, tools=TOOLS), chunks)
        calls = golden.named_calls(reply)
        assert (reply.content, calls) == ("Ok: ", (("Bash", '{"command": "ls"}'),))
