"""Replies whose answer a caller's grammar rules: after the thought, all is content."""

import json
import random
from itertools import product

import golden
import pytest

from backend.core.step import FinishReason
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.output.replay import cut_randomly
from backend.output.reply import ReplySpec
from backend.output.reply_format import OutputFormat

# These frame the whole reply, thoughts included.
OWN_THOUGHTS = {"harmony": "harmony", "muse_spark": "muse", "functionary": "none"}
FRAMED = ("harmony", "muse")
TOOLS = {"w": {"type": "object", "properties": {"content": {"type": "string"}}}}


def pairs():
    free = [reasoning for reasoning in REASONING_FORMATS if reasoning.name not in FRAMED]
    for turn, tools in enumerate(TOOL_FORMATS):
        own = OWN_THOUGHTS.get(tools.name)
        thoughts = [free[turn % len(free)], *(one for one in free if one.name == "think")]
        if own:
            thoughts = [one for one in REASONING_FORMATS if one.name == own]
        yield from (OutputFormat(reasoning, tools) for reasoning in thoughts)


PAIRS = list(pairs())
MARKS = sorted({mark for pair in PAIRS for mark in (*pair.markers, *pair.tools.leads)})


def answer_with(marks):
    return json.dumps({"a": f"x {' y '.join(marks)}\n</p>", "b": [*marks]}, ensure_ascii=False)


def reply_of(pair, answer, *, thinks):
    reasoning = pair.reasoning
    thought = f"{reasoning.start}hm{reasoning.end}{reasoning.bridge or chr(10)}"
    return (thought if thinks and reasoning.start else "") + reasoning.answer + answer


def spec_of(pair, **options):
    tail = "<|start|>assistant" if pair.reasoning.name in FRAMED else ""
    options = {"tools": TOOLS, "prompt_tail": tail, **options}
    return ReplySpec(format=pair, is_ruled=True, **options)


def test_all_thoughts_are_tested():
    assert {pair.reasoning for pair in PAIRS} == {*REASONING_FORMATS}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_every_mark_in_a_ruled_answer_is_content(pair):
    lots = random.Random(pair.name)
    own = sorted({*pair.markers, *pair.tools.leads})
    answer = answer_with([*own, *lots.sample(MARKS, 12)])
    for thinks, tools in product((True, False), (TOOLS, {})):
        text = reply_of(pair, answer, thinks=thinks)
        for chunks in ([text], text, cut_randomly(text, pair.name)):
            reply = golden.play(spec_of(pair, tools=tools), chunks)
            assert reply.content == answer
            assert reply.reasoning == ("hm" if thinks and pair.reasoning.start else "")
            assert not reply.tool_calls
            assert reply.finish.reason is FinishReason.STOP


@pytest.mark.parametrize("text", ["[]", '"<think>"', "  \n x\n\n", "[1, 2] ", "call:", "{", "<|"])
def test_no_byte_of_a_ruled_answer_is_lost(text):
    for pair in PAIRS:
        for stop in (FinishReason.STOP, FinishReason.LENGTH):
            for chunks in ([text], text):
                reply = golden.play(spec_of(pair), chunks, stop)
                assert (reply.content, reply.reasoning) == (text, ""), pair.name


def test_a_call_may_take_the_place_of_a_ruled_answer():
    for case in golden.cases():
        is_call_alone = case.tool_calls and not case.content and not case.reasoning
        if not is_call_alone or case.finish_reason is not FinishReason.TOOL_CALLS:
            continue
        ruled = ReplySpec(
            format=case.spec.format,
            tools=case.spec.tools,
            prompt_tail=case.spec.prompt_tail,
            is_ruled=True,
        )
        for chunks in ([case.text], case.text):
            reply = golden.play(ruled, chunks, case.stop)
            assert golden.named_calls(reply) == case.tool_calls, case.case_id
            assert reply.content == "", case.case_id


def test_a_thought_may_only_come_first():
    pair = golden.named_format("hermes_json", "think")
    reply = golden.play(spec_of(pair, prompt_tail="<think>\n\n</think>\n\n"), ["<think>no</think>"])
    assert (reply.content, reply.reasoning) == ("<think>no</think>", "")
    reply = golden.play(spec_of(pair, prompt_tail="<think>\n"), ["hm</think>\n\n\n<think>"])
    assert (reply.content, reply.reasoning) == ("\n<think>", "hm")


def test_an_answer_is_ruled_from_its_trigger_on():
    pair = golden.named_format("hermes_json", "think")
    spec = spec_of(pair, triggers=("DATA:", "<tool_call>"))
    call = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'
    text = f"<think>hm</think>So: DATA:{call}<think>"
    for chunks in ([text], text):
        reply = golden.play(spec, chunks)
        assert (reply.content, reply.reasoning) == (f"So: DATA:{call}<think>", "hm")
        assert not reply.tool_calls
        reply = golden.play(spec, [f"So: {call}"] if len(chunks) == 1 else f"So: {call}")
        assert (reply.content, golden.named_calls(reply)) == ("So: ", (("w", "{}"),))
        reply = golden.play(spec, "So: <tool_call> is a tag")
        assert reply.content == "So: <tool_call> is a tag"
