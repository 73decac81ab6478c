import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.package.interpreter import PROGRAM, Interpreter, InterpreterError, check
from scripts.package.libraries import bring_libraries


@pytest.fixture
def answering(tmp_path):
    """Write a program that answers as a Python with other facts would."""

    def write(**facts):
        usual = {"program": "p", "prefix": "/", "library": "/lib"}
        usual |= {"is_framework": False, "has_version": True}
        (tmp_path / "facts").write_text(json.dumps(usual | facts))
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\ncat '{tmp_path}/facts'\n")
        program.chmod(0o755)
        return program

    return write


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="most Pythons of macOS cannot be moved")
def test_a_copy_runs_from_a_place_with_a_space(tmp_path):
    python, libraries = tmp_path / "a place" / "python", tmp_path / "a place" / "lib"
    Interpreter.from_program(Path(sys.executable)).copy(python)
    bring_libraries(python, libraries)
    check(python, libraries)
    moved = python.rename(tmp_path / "moved")
    check(moved, libraries)
    done = subprocess.run([moved / PROGRAM, "-Ic", "import grpc"], capture_output=True, check=False)
    assert b"No module named 'grpc'" in done.stderr


def test_a_framework_build_is_refused_with_what_to_do(answering):
    with pytest.raises(InterpreterError, match=r"framework build.*PACKAGE_PYTHON="):
        Interpreter.from_program(answering(is_framework=True))


def test_an_old_python_is_refused(answering):
    with pytest.raises(InterpreterError, match=r"3\.11 or newer"):
        Interpreter.from_program(answering(has_version=False))


def test_a_copy_that_does_not_run_is_told(tmp_path):
    program = tmp_path / PROGRAM
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no libssl >&2; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(InterpreterError, match="does not run: no libssl"):
        check(tmp_path, tmp_path)
