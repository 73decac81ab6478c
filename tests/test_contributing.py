"""The lists of files in CONTRIBUTING.md are those of the code."""

import re
from pathlib import Path

import pytest

from backend.pb import backend_pb2 as pb

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RERANK = re.compile(r"\bRerank(Call|Request|Result)?\b")
METHODS = [
    method.name for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
]


def listed(title):
    section = GUIDE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^- `([^`]+)`:", section, re.MULTILINE)


def test_every_file_that_a_new_rpc_touches_knows_the_example():
    for name in listed("Adding an RPC"):
        assert RERANK.search((ROOT / name).read_text(encoding="utf-8")), name


def test_no_other_file_of_the_server_knows_the_example():
    knowing = {
        path.relative_to(ROOT).as_posix()
        for folder in ("core", "rpc", "pipeline", "media", "model", "output", "sampling", "cache")
        for path in (ROOT / "backend" / folder).rglob("*.py")
        if RERANK.search(path.read_text(encoding="utf-8"))
    }
    assert knowing == {name for name in listed("Adding an RPC") if name.startswith("backend/")}


def test_an_option_of_a_request_is_in_the_three_listed_files_and_no_other():
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "backend").rglob("*.py")
        if re.search(r"\bcache_hint\b", path.read_text(encoding="utf-8"))
    }
    assert knowing == set(listed("Adding an option of a request"))


@pytest.mark.parametrize("method", METHODS)
def test_every_rpc_is_documented(method):
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert any(re.search(rf"[`/]{method}`", page) for page in pages)
