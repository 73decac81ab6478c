"""Models of jobs: found as by LoadModel, and written completely or not at all."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.config import ModelOptions
from backend.errors import InvalidRequestError
from backend.jobs.job import Job
from backend.jobs.scratch import scratch
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
    if target.exists():
        raise InvalidRequestError(field, f"{target} exists already")


def was_cut_off(target: Path) -> bool:
    """Tell whether a process died while writing a target."""
    return _partial(target).exists()


@contextmanager
def written_whole(field: str, target: Path) -> Iterator[Path]:
    """Yield a directory to write to, which replaces the target once everything is written.

    An existing target stays until then.

    Args:
        field: The request field that names the target.
        target: A directory; it and its parents need not exist.

    Raises:
        InvalidRequestError: The target cannot be written.
    """
    with scratch(_partial(target)) as partial:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(field, f"{target}: {error.strerror}") from error
        yield partial
        with scratch(target.with_name(f".{target.name}.replaced")) as replaced:
            try:
                if target.exists():
                    target.rename(replaced)
                partial.rename(target)
            except OSError as error:
                raise InvalidRequestError(field, f"{target}: {error.strerror}") from error


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")
