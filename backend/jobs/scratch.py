"""Directories of a job that are gone when it ends, however it ends."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_open: set[Path] = set()


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Give a path where nothing is; whatever is there in the end is removed.

    A process that was killed may have left something there: it goes at the beginning.
    """
    shutil.rmtree(path, ignore_errors=True)
    _open.add(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _open.discard(path)


def remove_all() -> None:
    """Remove what is open, for a process that ends at once; from any thread."""
    for path in list(_open):
        shutil.rmtree(path, ignore_errors=True)
