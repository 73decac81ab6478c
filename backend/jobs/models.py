"""Models of jobs: found as by LoadModel, and written completely or not at all."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from backend.config import ModelOptions
from backend.errors import InvalidRequestError
from backend.jobs.job import Job
from backend.jobs.scratch import leftovers, scratch
from backend.model.checkpoint.hub import locate


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
