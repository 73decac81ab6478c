"""The walk of a turn in the real engine process, traced: how much one has to read to follow it."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from real_process import read_until_written, real_backend
from traced.sitecustomize import WANTED

from backend.pb import backend_pb2 as pb

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "backend" / "demo" / "model"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
# The first ones prefill, and learn what passes cost.
TURNS, SKIPPED = 240, 60
# A module of the page's table is one of nearly every turn.
USUAL_SHARE = 0.9
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def turns(tmp_path_factory):
    """The calls of turns that decode one stream, as lists of modules and functions."""
    folder = tmp_path_factory.mktemp("traced")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "support" / "traced")])
    file = folder / "turns"
    environment = os.environ | {"PYTHONPATH": path, WANTED: f"{file}:{TURNS}"}
    with real_backend(folder / "log", environment) as backend:
        backend.load(DEMO, Options=["check_at_load:true", "max_replies_per_s:0"])
        request = pb.PredictOptions(
            Prompt="Once upon a time there", Tokens=600, IgnoreEOS=True, Temperature=1.0, Seed=3
        )
        read_until_written(backend.stub.PredictStream(request, timeout=TIMEOUT_S), file)
        return json.loads(file.read_text(encoding="utf-8"))[SKIPPED:]


def changes(calls):
    """Return how often a turn goes from one module to another."""
    return sum(one != other for (one, _), (other, _) in pairwise(calls))


def modules(calls):
    return {module for module, _ in calls}


def test_a_turn_makes_few_calls_in_few_modules(turns):
    assert len(turns) == TURNS - SKIPPED
    assert median(map(len, turns)) <= 150
    assert median(map(changes, turns)) <= 60
    assert median(len(modules(calls)) for calls in turns) <= 22


def test_a_single_machine_never_enters_the_code_of_groups(turns):
    everything = set().union(*map(modules, turns))
    assert not {module for module in everything if ".distributed" in module}


def test_the_page_tells_a_request_and_a_turn_in_few_words():
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    told = [text for text in sections if re.match("The walk of|One turn of", text)]
    assert len(told) == 3
    assert sum(len(text.split()) for text in told) < 1200
    assert sum(len(text.split()) for text in sections) <= 2400


def test_the_page_names_the_modules_of_a_turn(turns):
    section = PAGE.read_text(encoding="utf-8").partition("## One turn of the engine\n")[2]
    rows = re.findall(r"^\| `([\w/]+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    named = {f"backend.{row.replace('/', '.')}" for row in rows}
    usual = {
        module
        for module in set().union(*map(modules, turns))
        if sum(module in modules(calls) for calls in turns) >= USUAL_SHARE * len(turns)
    }
    assert usual <= named
    # Other devices do without the functions of a CPU.
    common = {module for module in named if not module.startswith("backend.cpu.")}
    assert common <= set().union(*map(modules, turns))
