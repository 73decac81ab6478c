"""Replies from public bug reports of other servers, each with its right value."""

import json
from pathlib import Path
from random import Random

import golden
import pytest

from backend.output import replay

LINES = Path(__file__).with_name("reported_replies.jsonl").read_text(encoding="utf-8").splitlines()


def arguments(text):
    """Return the arguments of a call; of one that no client can run, the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def pieces(text, seed):
    """Cut a text at random; at seed 0 not at all, at seed 1 everywhere."""
    if seed < 2:
        return list(text) if seed else [text]
    places = sorted(Random(seed).sample(range(1, len(text)), min(9, len(text) - 1)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: json.loads(line)["id"])
def test_a_reported_reply_has_its_right_value(line):
    recording, expected = replay.read_recording(line), json.loads(line)["expected"]
    whole = "".join(recording.chunks)
    for seed in range(5):
        reply = golden.play(recording.spec, pieces(whole, seed), recording.stop)
        calls = [[call.name, arguments(call.arguments)] for call in reply.tool_calls]
        found = {"content": reply.content, "reasoning": reply.reasoning, "calls": calls}
        found["finish"] = reply.finish.reason.value
        assert {name: found[name] for name in expected} == expected, f"cut by seed {seed}"
