"""The contents of a package besides its Python: code, dependencies and documents."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backend import __version__
from scripts.package.interpreter import Interpreter

ROOT = Path(__file__).resolve().parents[2]
NAME = "mlx"
PACKAGES = "site-packages"
PAPERS = ("run.sh", "backend.proto", "LICENSE", "NOTICES.md")
EXTRAS = ("media", "metrics")
# The packages of a wheel, and the directory in it that they are in.
OURS = ("backend", "common")
PRIVATE = "_mlx_grpc_backend"
# Installed without its unneeded dependencies, as in `make install`.
WITHOUT_DEPENDENCIES = ("mlx-vlm",)


def requirements(extras: Sequence[str]) -> list[str]:
    """Return the requirements of `pyproject.toml`, with extras, without this project."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(entry for extra in extras for entry in optional[extra])]


def install_requirements(interpreter: Interpreter, package: Path, extras: Sequence[str]) -> None:
    """Install all required packages, in the versions of `constraints.txt`."""
    _install(interpreter, package, *requirements(extras))
    _install(interpreter, package, "--no-deps", *WITHOUT_DEPENDENCIES)


def unpack_ourselves(package: Path) -> None:
    """Copy `backend/` and `common/` of this project's wheel, with stubs, without tests."""
    with TemporaryDirectory() as directory:
        _pip("wheel", "--no-deps", "--no-build-isolation", "-w", directory, str(ROOT))
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
        for name in OURS:
            shutil.copytree(Path(directory, PRIVATE, name), package / name, dirs_exist_ok=True)


def write_papers(package: Path) -> None:
    """Copy the documents, and write the files that the host reads."""
    for name in PAPERS:
        shutil.copy(ROOT / name, package)
    (package / "THIRD-PARTY.txt").write_text(third_party(package / PACKAGES), encoding="utf-8")
    text = json.dumps(metadata(), indent=2)
    (package / "metadata.json").write_text(text + "\n", encoding="utf-8")


def third_party(packages: Path) -> str:
    """Return a line per installed package: its name, version and licence."""
    lines = []
    for found in distributions(path=[str(packages)]):
        texts = found.metadata
        kinds = [each for each in texts.get_all("Classifier", []) if each.startswith("License ::")]
        named = (texts.get("License") or "").strip().splitlines()[:1]
        licence = texts.get("License-Expression") or "; ".join(kinds) or "".join(named)
        lines.append(f"{found.name} {found.version}: {licence or 'see its files'}\n")
    return "".join(sorted(lines, key=str.lower))


def metadata() -> dict[str, Any]:
    """Return the host's `metadata.json`: the names by which models may request this backend."""
    return {"alias": NAME, "name": NAME, "version": __version__}


def compile_modules(package: Path, program: Path) -> None:
    """Compile all modules without time stamps: a package may be read-only, and copies lose them."""
    options = ["--invalidation-mode", "unchecked-hash", "-s", str(package), "-q", "-f", "-j", "0"]
    # Packages may contain files for other versions of Python, which do not compile.
    subprocess.run(  # noqa: S603 - the package's own Python
        [program, "-I", "-W", "ignore", "-m", "compileall", *options, package],
        stdout=subprocess.DEVNULL,
        check=False,
    )


def _install(interpreter: Interpreter, package: Path, *arguments: str) -> None:
    packages = package / PACKAGES
    _pip(
        *("--python", str(interpreter.program), "install", "--no-compile"),
        *("--no-warn-conflicts", "--root-user-action", "ignore"),
        *("-c", str(ROOT / "constraints.txt"), "--target", str(packages)),
        *arguments,
    )
    # Scripts name the Python of the build machine, and nothing here calls them.
    shutil.rmtree(packages / "bin", ignore_errors=True)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)  # noqa: S603 - our own arguments
