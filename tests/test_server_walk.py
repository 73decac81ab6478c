"""The walk of a token and of a submit in the real server, with a real engine over the socket."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from real_process import read_until_written, real_backend
from traced.sitecustomize import WANTED_REPLIES

from backend.pb import backend_pb2 as pb

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "backend" / "demo" / "model"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
# Of one token each: while the server is slower than the engine, tokens share a reply.
REPLIES, SKIPPED = 40, 10
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """The calls from reply to reply of one stream, and those of its submit."""
    folder = tmp_path_factory.mktemp("traced")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "support" / "traced")])
    file = folder / "replies"
    environment = os.environ | {"PYTHONPATH": path, WANTED_REPLIES: f"{file}:{REPLIES}"}
    with real_backend(folder / "log", environment) as backend:
        backend.load(DEMO, Options=["check_at_load:true", "max_replies_per_s:0"])
        request = pb.PredictOptions(
            Prompt="Once upon a time there", Tokens=1500, IgnoreEOS=True, Temperature=1.0, Seed=3
        )
        read_until_written(backend.stub.PredictStream(request, timeout=TIMEOUT_S), file)
        *replies, submit = json.loads(file.read_text(encoding="utf-8"))
        return replies[SKIPPED:], submit


def modules(calls):
    return {module for module, _ in calls}


def test_a_token_makes_few_calls_in_few_modules(walks):
    replies, _ = walks
    assert len(replies) == REPLIES - SKIPPED
    assert median(map(len, replies)) <= 45
    # From reply to reply is a circle.
    assert median(sum(a[0] != b[0] for a, b in pairwise([*r, r[0]])) for r in replies) <= 20
    assert median(len(modules(calls)) for calls in replies) <= 14


def test_a_submit_crosses_few_modules(walks):
    _, submit = walks
    assert len(modules(submit)) <= 6
    assert "backend.engine.messages.codec" in modules(submit)


def test_the_page_names_modules_of_a_token(walks):
    replies, _ = walks
    section = PAGE.read_text(encoding="utf-8").partition("## The walk of a token\n")[2]
    rows = re.findall(r"^\| \d+ \| loop \| `([\w/]+)`", section.partition("\n## ")[0], re.MULTILINE)
    named = {f"backend.{row.replace('/', '.')}" for row in rows}
    # The request has no stop strings.
    assert named - {"backend.output.reply"} <= set().union(*map(modules, replies))
    assert len(named) == len(rows) > 1
