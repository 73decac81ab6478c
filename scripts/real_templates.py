"""Fetches the chat templates of real models from llama.cpp's Python package.

`make templates` puts them into `build/templates`, where
`tests/model/text/test_real_templates.py` finds them. They belong to their models' authors, and are
not part of this repository.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
TARGET = Path(__file__).parent.parent / "build" / "templates"
_FOLDER = "/models/templates/"


def fetch(target: Path = TARGET) -> int:
    """Download the package's sources, and return the number of extracted templates."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        sources = ["--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}", "--dest", folder]
        subprocess.run([*command, *sources], check=True)  # noqa: S603 (fixed words)
        (archive,) = Path(folder).glob("*.tar.gz")
        return _unpack(archive, target)


def _unpack(archive: Path, target: Path) -> int:
    target.mkdir(parents=True, exist_ok=True)
    count = 0
    with tarfile.open(archive) as sources:
        for member in sources:
            is_template = _FOLDER in member.name and member.name.endswith(".jinja")
            if is_template and (file := sources.extractfile(member)):
                with file, (target / Path(member.name).name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
                count += 1
    return count


if __name__ == "__main__":
    sys.stdout.write(f"{fetch()} templates in {TARGET}\n")
