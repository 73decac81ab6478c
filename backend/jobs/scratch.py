"""Directories of a job's own for incomplete output, removed however the job ends.

Such a directory contains a mark, a file that the job keeps locked while it lives. Nothing without
a mark is touched, whatever its name, and links are not followed.
"""

import asyncio
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from backend.config import ModelOptions
from backend.errors import InvalidRequestError
from backend.jobs.job import Job
from backend.model.checkpoint.hub import locate

MARK = ".mlx-grpc-backend-job"
_MAX_NAMES = 100
_OPEN_MARK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_open: set[Path] = set()


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Yield a free path inside a new directory, which is removed on exit.

    Leftovers of a killed process are removed on entry.

    Args:
        path: The directory; a number is added to its name if something else is there. Missing
            parents are created.

    Raises:
        OSError: It cannot be created.
    """
    remove_leftovers(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = _created(path)
    mark = os.open(own / MARK, _OPEN_MARK | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX)
        _open.add(own)
        yield own / "content"
    finally:
        shutil.rmtree(own, ignore_errors=True)
        _open.discard(own)
        os.close(mark)


def leftovers(path: Path) -> list[Path]:
    """Return the directories that killed processes left at a path."""
    return [each for each in _names(path) if _is_left_over(each)]


def remove_leftovers(path: Path) -> None:
    """Remove the directories that killed processes left at a path."""
    for each in leftovers(path):
        shutil.rmtree(each, ignore_errors=True)


def remove_all() -> None:
    """Remove all open directories, for a process that exits at once; from any thread."""
    for path in list(_open):
        shutil.rmtree(path, ignore_errors=True)


def _names(path: Path) -> Iterator[Path]:
    """Yield the existing directories that could be scratch directories for a path."""
    yield path
    for number in range(1, _MAX_NAMES):
        other = path.with_name(f"{path.name}-{number}")
        if not other.is_symlink() and not other.exists():
            return
        yield other


def _created(path: Path) -> Path:
    for each in (path, *(path.with_name(f"{path.name}-{n}") for n in range(1, _MAX_NAMES))):
        with suppress(FileExistsError):
            each.mkdir()
            return each
    raise FileExistsError(f"{path} exists already, and so do {_MAX_NAMES - 1} names like it")


def _is_left_over(path: Path) -> bool:
    """Tell whether a directory has a mark that no process holds."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        mark = os.open(MARK, _OPEN_MARK, dir_fd=directory)
    except OSError:
        return False
    finally:
        os.close(directory)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.S_ISREG(os.fstat(mark).st_mode)
    except OSError:
        return False
    finally:
        os.close(mark)


def find_model(model: str, job: Job) -> Path:
    """Return the directory of a job's model, fetching it from the hub if it is not on disk.

    Raises:
        LoadError: There is no such model, or it could not be fetched.
    """
    directory = Path(job.models_dir) if job.models_dir else None
    options = ModelOptions(model=model, models_dir=directory)
    return asyncio.run(locate(options, job.download_environment or None))


def require_new(field: str, target: Path) -> None:
    """Refuse a target that already exists.

    Raises:
        InvalidRequestError: The target exists.
    """
    if os.path.lexists(target):
        raise InvalidRequestError(field, f"{target} exists already")


def was_cut_off(target: Path) -> bool:
    """Tell whether a process died while writing a target."""
    return bool(leftovers(_partial(target)))


@contextmanager
def written_whole(
    field: str, target: Path, *, may_replace: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Yield a path for a directory, which becomes the target once everything is written.

    An existing target stays until then.

    Args:
        field: The request field that names the target.
        target: A directory; its parents need not exist.
        may_replace: Tells whether an existing one is ours.

    Raises:
        InvalidRequestError: The target cannot be written, or exists and is not ours.
    """
    if target.is_symlink() or not may_replace(target):
        require_new(field, target)
    with ExitStack() as stack:
        try:
            partial = stack.enter_context(scratch(_partial(target)))
        except OSError as error:
            raise InvalidRequestError(field, f"{target}: {error.strerror or error}") from error
        yield partial
        try:
            if target.exists():
                target.rename(partial.with_name("replaced"))
            partial.rename(target)
        except OSError as error:
            raise InvalidRequestError(field, f"{target}: {error.strerror}") from error


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")
