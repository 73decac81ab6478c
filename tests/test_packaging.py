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

from common.openblas import find_openblas

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
    assert names == {"_mlx_grpc_backend"}
    ours = installed / "_mlx_grpc_backend"
    assert {path.name for path in ours.iterdir()} == {"__init__.py", "backend", "common"}
    assert (ours / "backend" / "pb" / "backend_pb2_grpc.py").is_file()


@pytest.mark.slow
def test_the_wheel_brings_the_embedded_model(installed):
    code = "import sys; from _mlx_grpc_backend import main; sys.argv[1:] = ['pull', 'demo']; main()"
    done = run_there(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.removeprefix("demo is in ").rstrip())
    assert directory.is_relative_to(installed)
    assert (directory / "model.safetensors").is_file()


@pytest.mark.mlx
def test_the_wheel_does_the_main_job(installed):
    code = "import sys; from _mlx_grpc_backend import main; sys.argv[1:] = ['demo']; main()"
    done = run_there(installed, "-c", code)
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


@pytest.mark.parametrize(
    ("target", "extras"), [("demo", ".[cpu]"), ("test", ".[dev,media,metrics,cpu]")]
)
def test_the_demo_needs_a_small_environment_and_the_tests_all(tmp_path, target, extras):
    command = ["make", "--dry-run", target, f"VENV={tmp_path}/venv", "MLX_EXTRA=cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if " -e " in line]
    assert line.endswith(f"-c constraints.txt -e '{extras}'")


@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
def test_an_installed_blas_is_seen_without_the_paths_of_root():
    script = ["/bin/sh", ROOT / "scripts" / "install_blas.sh"]
    path = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(script, env=path, capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize(("uv", "tool"), [("exit 0", "uv"), ("exit 1", "pip"), (None, "pip")])
def test_packages_are_installed_with_uv_or_else_with_pip(tmp_path, uv, tool):
    said = tmp_path / "said"
    scripts = {"python": f'echo "pip $@" >>{said}'}
    if uv:
        scripts["uv"] = f'echo "uv $@" >>{said}\n{uv}'
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = [ROOT / "scripts" / "install_packages.sh", tmp_path / "python", "-c", "c.txt", "some"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["/bin/sh", *map(str, script)], env=environment, check=True, capture_output=True)
    last = said.read_text().splitlines()[-1]
    assert last.startswith(tool)
    assert last.endswith("-c c.txt some")
