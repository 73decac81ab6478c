"""Becomes the server: `python -m backend.cli.serve --addr HOST:PORT`. Imports nothing slow.

It is the counterpart of `run.sh` for an installed wheel.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from common.openblas import INSTALL_HINT, find_openblas, is_wanted, preloading

_ROOT = Path(__file__).parents[2]


def main() -> NoReturn:
    """Serve with the arguments of this process."""
    become_server(sys.argv[1:])


def become_server(arguments: Sequence[str]) -> NoReturn:
    """Replace this process with the server, so that signals and its parent's death reach it."""
    library = find_openblas() if is_wanted(os.environ) else None
    if library is not None:
        _say(f"preloading {library} in place of MLX's reference BLAS")
    elif is_wanted(os.environ):
        _say(f"no OpenBLAS found, MLX uses its slow reference BLAS; install one: {INSTALL_HINT}")
    _become("backend", arguments, library)


def become_rank(arguments: Sequence[str]) -> NoReturn:
    """Replace this process with a worker of a group of machines."""
    _become("backend.rank", arguments, find_openblas() if is_wanted(os.environ) else None)


def _become(module: str, arguments: Sequence[str], library: Path | None) -> NoReturn:
    command = [sys.executable, "-P", "-m", module, *arguments]
    os.execve(sys.executable, command, server_environment(os.environ, library))  # noqa: S606 - ours


def server_environment(environment: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """Return the environment in which `python -P -m backend` finds this package.

    Args:
        library: The BLAS to use instead of MLX's own, if any.
    """
    before = environment.get("PYTHONPATH")
    paths = os.pathsep.join(filter(None, [str(_ROOT), before]))
    found = {**environment, "PYTHONPATH": paths}
    return preloading(found, library) if library else found


def _say(text: str) -> None:
    """Write a line, if anything takes it."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"serve: {text}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main()
