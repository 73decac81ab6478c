"""Runs a Python module with the BLAS that `run.sh` preloads: `with_blas MODULE ARGUMENT...`.

Models of real sizes take minutes with the one in MLX's wheel for Linux.
"""

import os
import sys

from common import openblas


def main() -> None:
    """Become the module's process."""
    environment = dict(os.environ)
    library = openblas.find_openblas() if openblas.is_wanted(environment) else None
    if library:
        environment = openblas.preloading(environment, library)
    words = [sys.executable, "-m", *sys.argv[1:]]
    os.execve(sys.executable, words, environment)  # noqa: S606 (the caller's own words)


if __name__ == "__main__":
    main()
