"""The walks of a request, a token and a turn in real processes, traced: how much there is to read.

One stream of a real server and engine is traced in both.
"""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from real_process import read_until_written, real_backend
from traced.sitecustomize import WANTED, WANTED_REPLIES

from backend.pb import backend_pb2 as pb

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "backend" / "demo" / "model"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
# The first ones prefill, and learn the costs of passes.
TURNS, SKIPPED_TURNS = 240, 60
# Of one token each: while the server is slower than the engine, tokens share a reply.
REPLIES, SKIPPED_REPLIES = 40, 10
# A module of the page's table is one of nearly every turn.
USUAL_SHARE = 0.9
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The traces of engine and server for a stream, by the variable that asks for each."""
    folder = tmp_path_factory.mktemp("traced")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "support" / "traced")])
    files = {WANTED: folder / "turns", WANTED_REPLIES: folder / "replies"}
    counts = {WANTED: TURNS, WANTED_REPLIES: REPLIES}
    wanted = {name: f"{file}:{counts[name]}" for name, file in files.items()}
    with real_backend(folder / "log", os.environ | {"PYTHONPATH": path} | wanted) as backend:
        backend.load(DEMO, Options=["check_at_load:true", "max_replies_per_s:0"])
        request = pb.PredictOptions(
            Prompt="Once upon a time there", Tokens=1500, IgnoreEOS=True, Temperature=1.0, Seed=3
        )
        stream = backend.stub.PredictStream(request, timeout=TIMEOUT_S)
        read_until_written(stream, *files.values())
        return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


@pytest.fixture(scope="module")
def turns(traced):
    """The calls of turns that decode one stream, as lists of modules and functions."""
    return traced[WANTED][SKIPPED_TURNS:]


@pytest.fixture(scope="module")
def replies(traced):
    """The calls of the server from reply to reply."""
    return traced[WANTED_REPLIES][SKIPPED_REPLIES:-1]


@pytest.fixture(scope="module")
def submit(traced):
    return traced[WANTED_REPLIES][-1]


def changes(calls):
    """Return how often calls go from one module to another."""
    return sum(one != other for (one, _), (other, _) in pairwise(calls))


def modules(calls):
    return {module for module, _ in calls}


def named(section, row):
    """Return the modules in a table of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [f"backend.{name.replace('/', '.')}" for name in re.findall(row, text, re.MULTILINE)]


def test_a_turn_makes_few_calls_in_few_modules(turns):
    assert len(turns) == TURNS - SKIPPED_TURNS
    assert median(map(len, turns)) <= 150
    assert median(map(changes, turns)) <= 60
    assert median(len(modules(calls)) for calls in turns) <= 22


def test_a_single_machine_never_enters_the_code_of_groups(turns):
    everything = set().union(*map(modules, turns))
    assert not {module for module in everything if ".distributed" in module}


def test_a_token_makes_few_calls_in_few_modules(replies):
    assert len(replies) == REPLIES - SKIPPED_REPLIES
    assert median(map(len, replies)) <= 45
    # From reply to reply is a circle.
    assert median(changes([*calls, calls[0]]) for calls in replies) <= 20
    assert median(len(modules(calls)) for calls in replies) <= 14


def test_a_submit_crosses_few_modules(submit):
    assert len(modules(submit)) <= 6
    assert "backend.engine.messages.codec" in modules(submit)


def test_the_page_tells_a_request_and_a_turn_in_few_words():
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    told = [text for text in sections if re.match("The walk of|One turn of", text)]
    assert len(told) == 3
    assert sum(len(text.split()) for text in told) < 1200
    assert sum(len(text.split()) for text in sections) <= 2400


def test_the_page_names_the_modules_of_a_turn(turns):
    found = set(named("One turn of the engine", r"^\| `([\w/]+)` \|"))
    usual = {
        module
        for module in set().union(*map(modules, turns))
        if sum(module in modules(calls) for calls in turns) >= USUAL_SHARE * len(turns)
    }
    assert usual <= found
    # Other devices do without the functions of a CPU.
    common = {module for module in found if not module.startswith("backend.cpu.")}
    assert common <= set().union(*map(modules, turns))


def test_the_page_names_modules_of_a_token(replies):
    rows = named("The walk of a token", r"^\| \d+ \| loop \| `([\w/]+)`")
    # The request has no stop strings.
    assert {*rows} - {"backend.output.reply"} <= set().union(*map(modules, replies))
    assert len({*rows}) == len(rows) > 1
