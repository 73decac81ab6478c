"""The walk of a load in the real processes, traced: how many modules it visits."""

import json
import os
from pathlib import Path

from real_process import real_backend
from traced.sitecustomize import LOADS, WANTED_LOAD

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "backend" / "demo" / "model"
MOST_MODULES = 180


def test_a_load_visits_few_modules(tmp_path):
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "support" / "traced")])
    environment = os.environ | {"PYTHONPATH": path, WANTED_LOAD: str(tmp_path)}
    with real_backend(tmp_path / "log", environment) as backend:
        backend.load(DEMO)
        visited = {name: json.loads((tmp_path / name).read_text("utf-8")) for name in LOADS}
    assert "backend.engine.assembly" in visited["engine"]
    assert "backend.engine.engine" in visited["server"]
    every = {module for modules in visited.values() for module in modules}
    assert len(every) <= MOST_MODULES
