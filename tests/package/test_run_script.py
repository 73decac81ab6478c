"""Which Python and which libraries `run.sh` takes, in a checkout and in a package."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

RUN_SH = Path(__file__).parents[2] / "run.sh"
TELL = """#!/bin/sh
echo "python=$0"; echo "arguments=$*"; echo "path=$PYTHONPATH"; echo "home=${PYTHONHOME-none}"
echo "parent=$MLX_BACKEND_PARENT"
echo "libraries=${LD_LIBRARY_PATH-none}"; echo "preload=${LD_PRELOAD-none}"
"""


@pytest.fixture
def root(tmp_path):
    directory = tmp_path / "a backend"
    directory.mkdir()
    shutil.copy(RUN_SH, directory)
    return directory


def put_python(place):
    place.parent.mkdir(parents=True)
    place.write_text(TELL)
    place.chmod(0o755)


def run(root, **environment):
    done = subprocess.run(
        [root / "run.sh", "--addr", "a:1"],
        env={"PATH": os.environ["PATH"], "MLX_BACKEND_PRELOAD_BLAS": "0"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_a_package_uses_what_it_brings_and_nothing_else(root):
    put_python(root / "python" / "bin" / "python3")
    put_python(root / ".venv" / "bin" / "python")
    (root / "lib").mkdir()
    told = run(root, PYTHONHOME="/elsewhere", LD_LIBRARY_PATH="/host/lib")
    assert told["python"] == str(root / "python" / "bin" / "python3")
    assert told["arguments"] == "-P -m backend --addr a:1"
    assert told["path"] == f"{root}:{root}/site-packages"
    assert told["home"] == "none"
    assert told["libraries"] == f"{root}/lib:/host/lib"


def test_a_checkout_uses_its_environment_and_leaves_libraries_alone(root):
    put_python(root / ".venv" / "bin" / "python")
    told = run(root)
    assert told["python"] == str(root / ".venv" / "bin" / "python")
    assert told["path"] == str(root)
    assert told["libraries"] == "none"


def test_without_an_environment_it_is_the_python_on_the_path(root, tmp_path):
    put_python(tmp_path / "bin" / "python3")
    told = run(root, PATH=f"{tmp_path}/bin:{os.environ['PATH']}", PYTHONPATH="/more")
    assert told["python"] == str(tmp_path / "bin" / "python3")
    assert told["path"] == f"{root}:/more"


@pytest.mark.skipif(
    platform.system() != "Linux" or Path("/dev/nvidiactl").exists(), reason="Linux without a GPU"
)
def test_its_own_openblas_is_preloaded_by_name_because_paths_may_hold_spaces(root):
    put_python(root / "python" / "bin" / "python3")
    (root / "lib").mkdir()
    (root / "lib" / "libopenblas.so.0").touch()
    told = run(root, MLX_BACKEND_PRELOAD_BLAS="1")
    assert told["preload"].split(":")[0] == "libopenblas.so.0"


def test_the_parent_is_recorded_before_python_runs(root):
    put_python(root / ".venv" / "bin" / "python")
    assert run(root)["parent"] == str(os.getpid())
