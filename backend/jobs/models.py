"""Models of jobs: found as LoadModel finds them, and written whole or not at all."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.config import ModelOptions
from backend.errors import InvalidRequestError
from backend.jobs.scratch import scratch
from backend.model.checkpoint.hub import locate


def find_model(model: str, models_dir: str) -> Path:
    """Return the directory of a model, fetched from the hub if it is not on disk.

    Raises:
        LoadError: There is no such model, or it could not be fetched.
    """
    directory = Path(models_dir) if models_dir else None
    return asyncio.run(locate(ModelOptions(model=model, models_dir=directory)))


def require_new(field: str, target: Path) -> None:
    """Refuse to write where something is already.

    Raises:
        InvalidRequestError: Something is there.
    """
    if target.exists():
        raise InvalidRequestError(field, f"{target} exists already")


def was_cut_off(target: Path) -> bool:
    """Tell whether a process died while it wrote a target."""
    return _partial(target).exists()


@contextmanager
def written_whole(field: str, target: Path) -> Iterator[Path]:
    """Give a place to write to, which becomes the target when all is written.

    What was at the target stays until then.

    Args:
        field: Names the target in the request.
        target: A directory; need not exist, nor its parents.

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
