"""Valid outputs of every format, damaged by one drop, doubling, swap or addition."""

import json
import logging
import random
import re

import golden
import pytest
from tool_replies import FORMATS, TOOLS

from backend.core.delta import FinishReason
from backend.output.reply import ReplySpec

SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
MARKER = re.compile(r"</?[^<>\s]{1,40}>?|<\|[^|]*\|>|\[/?[A-Z_]+\]|\"|'|[{}\[\]]|\n")
DAMAGES = 20

pytestmark = pytest.mark.slow


def spec_of(name):
    reply = FORMATS[name]
    return ReplySpec(
        format=golden.named_format(reply.parser or name, reply.reasoning),
        tools=SCHEMAS,
        prompt_tail=reply.prompt_tail,
    )


def damaged(text, seed):
    """Yield texts in which one marker or quote was dropped, doubled, swapped, or cut off after."""
    choice = random.Random(seed)
    places = [(found.start(), found.end()) for found in MARKER.finditer(text)]
    for _ in range(DAMAGES):
        start, end = choice.choice(places)
        marker = text[start:end]
        other = text[slice(*choice.choice(places))]
        damage = choice.choice(["", marker * 2, other])
        yield text[:start] + damage + text[end:]


def outcome(spec, chunks, stop=FinishReason.STOP):
    completion = golden.play(spec, chunks, stop)
    calls = golden.named_calls(completion)
    return completion.content, completion.reasoning, calls, completion.finish.reason


@pytest.mark.parametrize("name", FORMATS)
def test_damage_raises_nothing_and_depends_on_no_cut(name, caplog):
    spec, reply = spec_of(name), FORMATS[name]
    for text in damaged(reply.two or reply.one, seed=name):
        whole = outcome(spec, [text])
        assert outcome(spec, text) == whole, text
        assert all(record.levelno < logging.ERROR for record in caplog.records), text


@pytest.mark.parametrize("name", FORMATS)
def test_a_completed_call_has_valid_arguments_and_none_runs_twice(name):
    spec, reply = spec_of(name), FORMATS[name]
    for text in damaged(reply.two or reply.one, seed=name):
        _, _, calls, finish = outcome(spec, [text])
        assert len(calls) == len(set(calls)), text
        if finish is FinishReason.TOOL_CALLS:
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls), text


@pytest.mark.parametrize("name", [name for name, reply in FORMATS.items() if reply.two])
def test_an_undeclared_argument_is_one_like_any_other(name):
    spec, reply = spec_of(name), FORMATS[name]
    text = reply.two.replace("pri", "lang", 1) if "pri" in reply.two else reply.two
    text = text.replace("</pri>", "</lang>", 1)
    _, _, calls, finish = outcome(spec, [text])
    assert finish is FinishReason.TOOL_CALLS
    assert [called for called, _ in calls] == ["note_add", "clock_now"]
    assert json.loads(calls[0][1]).keys() == {"text", "lang"}
