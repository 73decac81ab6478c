"""The walks of a load and of a request in the real processes, traced: the modules they visit."""

import json
import os
import re
from pathlib import Path

import pytest
from real_process import real_backend
from traced.sitecustomize import LOADS, WANTED_LOAD

from backend.pb import backend_pb2 as pb

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "backend" / "demo" / "model"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
MOST_MODULES = 126
CHAT = pb.PredictOptions(
    UseTokenizerTemplate=True, Messages=[pb.Message(role="user", content="Once")], Tokens=2
)
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """The modules of each walk, in the order of the first visits."""
    folder = tmp_path_factory.mktemp("traced")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "support" / "traced")])
    environment = os.environ | {"PYTHONPATH": path, WANTED_LOAD: str(folder)}
    # Other tests of the run may have tried the model already: this load does, whatever came before.
    environment |= {"MLX_BACKEND_FINDINGS": str(folder / "findings.json")}
    with real_backend(folder / "log", environment) as backend:
        backend.load(DEMO)
        for _ in backend.stub.PredictStream(CHAT, timeout=TIMEOUT_S):
            pass
        return {
            name: json.loads((folder / name).read_text("utf-8")) for name in (*LOADS, "request")
        }


def test_a_load_visits_few_modules(walks):
    assert "backend.engine.assembly" in walks["engine"]
    assert "backend.engine.engine" in walks["server"]
    assert len({module for name in LOADS for module in walks[name]}) <= MOST_MODULES


def test_a_request_visits_the_modules_of_its_table_in_order(walks):
    section = PAGE.read_text(encoding="utf-8").partition("## The walk of a request\n")[2]
    rows = re.findall(r"^\| \d+ \| .*", section.partition("\n## ")[0], re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([\w/]+)`", row.split(" | ")[2])]
    *named, last = (f"backend.{path.replace('/', '.')}" for path in paths)
    assert [module for module in walks["request"] if module in named] == named
    # It gives the handle of the model before, and takes the request at the end.
    assert last == "backend.engine.engine"
    assert last in walks["request"]
