"""A relocatable copy of a CPython: its program and its standard library."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path("bin", "python3")

# A server does not need these, and some of their libraries are GPL.
LEFT_OUT = (
    "__pycache__", "site-packages", "dist-packages", "config-*", "test", "tests", "idlelib",
    "tkinter", "turtledemo", "turtle.py", "ensurepip", "venv", "lib2to3", "pydoc_data", "curses",
    "dbm", "_tkinter*.so", "_curses*.so", "readline*.so", "_dbm*.so", "_gdbm*.so", "nis*.so",
    "_test*.so", "xxlimited*.so",
)  # fmt: skip

QUESTION = """
import json, sys, sysconfig
print(json.dumps({
    "program": getattr(sys, "_base_executable", sys.executable),
    "prefix": sys.base_prefix,
    "library": sysconfig.get_path("stdlib"),
    "is_framework": bool(sysconfig.get_config_var("PYTHONFRAMEWORK")),
    "has_version": sys.version_info >= (3, 11),
}))
"""


class InterpreterError(Exception):
    """This Python cannot be packaged; the message gives the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A CPython on this machine.

    Attributes:
        library: The directory of its standard library.
    """

    program: Path
    prefix: Path
    library: Path

    @classmethod
    def from_program(cls, program: Path) -> "Interpreter":
        """Return the CPython of `program`, for a virtual environment its base.

        Raises:
            InterpreterError: It is too old, or not relocatable.
        """
        command = [str(program), "-I", "-c", QUESTION]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - chosen by the developer
        facts = json.loads(done.stdout)
        if not facts["has_version"]:
            raise InterpreterError(f"{program}: Python 3.11 or newer is needed")
        if facts["is_framework"]:
            raise InterpreterError(
                f"{program} is a macOS framework build, which cannot be moved; name a standalone "
                'one: make package PACKAGE_PYTHON="$(uv python find --managed-python 3.12)"'
            )
        return cls(
            program=Path(facts["program"]).resolve(),
            prefix=Path(facts["prefix"]),
            library=Path(facts["library"]),
        )

    def copy(self, destination: Path) -> None:
        """Copy it to a new path, as a separate prefix without any packages."""
        program = destination / PROGRAM
        program.parent.mkdir(parents=True)
        shutil.copy(self.program, program)
        shutil.copytree(
            self.library,
            destination / self.library.relative_to(self.prefix),
            ignore=shutil.ignore_patterns(*LEFT_OUT),
        )
        for library in (self.prefix / "lib").glob("libpython3*.dylib"):
            shutil.copy(library, destination / "lib")


def check(destination: Path, libraries: Path) -> None:
    """Run a copy with its packaged libraries.

    Raises:
        InterpreterError: It does not run, or takes its standard library from elsewhere.
    """
    code = "import ssl, ctypes, zlib, sqlite3, encodings; print(encodings.__file__)"
    program = destination / PROGRAM
    done = subprocess.run(  # noqa: S603 - the copy just made
        [program, "-I", "-B", "-c", code],
        env={"LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise InterpreterError(f"the copy of Python does not run: {done.stderr.strip()}")
    if not Path(done.stdout.strip()).is_relative_to(destination.resolve()):
        raise InterpreterError(f"the copy of Python uses {done.stdout.strip()}")
