"""Temporary directories of a job, removed however the job ends."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_open: set[Path] = set()


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Yield a free path; whatever exists there is removed on exit.

    Leftovers of a killed process are removed on entry.
    """
    shutil.rmtree(path, ignore_errors=True)
    _open.add(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _open.discard(path)


def remove_all() -> None:
    """Remove all open directories, for a process that exits at once; from any thread."""
    for path in list(_open):
        shutil.rmtree(path, ignore_errors=True)
