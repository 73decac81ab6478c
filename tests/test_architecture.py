import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULE_CEILING = 400
SOURCES = [
    path
    for package in ("backend", "common", "benchmarks", "scripts")
    for path in (ROOT / package).rglob("*.py")
    if "_pb2" not in path.name
]
ENVIRONMENT_READERS = {ROOT / "backend" / "__main__.py", ROOT / "backend" / "worker.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_longer_than_the_ceiling(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MODULE_CEILING


def test_the_environment_is_read_where_processes_begin():
    readers = {
        path
        for path in SOURCES
        if path.is_relative_to(ROOT / "backend")
        and any(
            isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    }
    assert readers <= ENVIRONMENT_READERS


def test_no_tracked_file_holds_a_path_of_a_machine():
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    # Spelled in pieces, so that this file does not match itself.
    machine_path = re.compile(r"(?<![\w.])/(" + "|".join(["work", "root", "farm"]) + r")/\w")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".safetensors"} or not path.is_file():
            continue
        assert not machine_path.search(path.read_text(encoding="utf-8")), name


def test_importing_the_server_does_not_import_mlx():
    code = (
        "import sys, backend.__main__, backend.rpc.server\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
