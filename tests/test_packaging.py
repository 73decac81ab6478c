import os
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, unpacked far from the checkout."""
    place = tmp_path_factory.mktemp("wheel")
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", place, ROOT]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True)
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "content")
    return place / "content"


def run_there(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=installed.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_wheel_holds_our_packages_and_nothing_else(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"backend", "common"}
    assert (installed / "backend" / "pb" / "backend_pb2_grpc.py").is_file()


@pytest.mark.slow
def test_the_wheel_brings_the_embedded_model(installed):
    code = (
        "import backend; from backend.demo import MODEL_DIR; "
        "assert (MODEL_DIR / 'model.safetensors').is_file(); print(backend.__file__)"
    )
    done = run_there(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))


@pytest.mark.mlx
def test_the_wheel_does_the_main_job(installed):
    done = run_there(installed, "-m", "backend.cli", "demo")
    assert done.returncode == 0, done.stderr
    assert "get_weather" in done.stdout
    assert "degrees in Hanoi" in done.stdout


def test_every_pinned_package_runs_on_the_python_of_debian_12():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(Requirement(line).name) for line in lines}
    needs = {
        each.name: each.metadata.get("Requires-Python")
        for each in distributions()
        if canonicalize_name(each.name) in pinned and each.metadata.get("Requires-Python")
    }
    assert len(needs) > len(lines) / 2
    assert [name for name, python in needs.items() if "3.11.2" not in SpecifierSet(python)] == []
