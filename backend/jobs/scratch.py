"""The directories of jobs: scratch ones, removed however a job ends, and checkpoints."""

import asyncio
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from backend.config import ModelOptions
from backend.errors import BackendError, InvalidRequestError
from backend.jobs.job import Job
from backend.model.checkpoint.hub import locate
from common.directories import make_directories

MARK = ".mlx-grpc-backend-job"
_MAX_NAMES = 100
_PROBE_BYTES = 2**16
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
    make_directories(path.parent)
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
    """Return the directory of a job's model, fetching it from the hub if it is not on disk."""
    directory = Path(job.models_dir) if job.models_dir else None
    options = ModelOptions(model=model, models_dir=directory)
    return asyncio.run(locate(options, job.download_environment or None))


def require_new(field: str, target: Path) -> None:
    """Refuse a target that already exists."""
    if os.path.lexists(target):
        raise InvalidRequestError(field, f"{target} exists already")


def require_apart(field: str, target: Path, source: Path) -> None:
    """Refuse a target inside a directory that the job reads, and that others may load."""
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise InvalidRequestError(field, f"{target} is inside {source}, which the job reads")


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
        target: A directory; its parents need not exist.
    """
    if target.is_symlink() or not may_replace(target):
        require_new(field, target)
    with ExitStack() as stack:
        try:
            partial = stack.enter_context(scratch(_partial(target)))
        except OSError as error:
            raise InvalidRequestError(field, f"{target}: {error.strerror or error}") from error
        with refusals_of_disk(field, target, partial.parent):
            yield partial
        try:
            if target.exists():
                target.rename(partial.with_name("replaced"))
            partial.rename(target)
        except OSError as error:
            raise InvalidRequestError(field, f"{target}: {error.strerror}") from error


@contextmanager
def refusals_of_disk(field: str, target: Path, place: Path) -> Iterator[None]:
    """Turn an error into one of a field if the disk takes nothing more.

    Libraries have errors of their own for that, which tell neither the reason nor the place.

    Args:
        field: Of the request, which names the target.
        place: The directory that is written to.
    """
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        try:
            with TemporaryFile(dir=place) as file:
                file.write(bytes(_PROBE_BYTES))
        except OSError as refusal:
            raise InvalidRequestError(field, f"{target}: {refusal.strerror}") from error
        raise


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


WEIGHTS, CONFIG, STATE = "adapters.safetensors", "adapter_config.json", "training_state.json"
_PREFIX = "checkpoint-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with an adapter, and the progress of its training.

    Attributes:
        created_at: ISO 8601, UTC.
    """

    path: Path
    step: int
    epoch: float
    loss: float
    created_at: str


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return output_dir / f"{_PREFIX}{step}"


def write_state(directory: Path, step: int, epoch: float, loss: float) -> None:
    """Save the progress of the training next to the weights."""
    state = {"step": step, "epoch": epoch, "loss": loss}
    (directory / STATE).write_text(json.dumps(state), encoding="utf-8")


def list_checkpoints(output_dir: Path) -> list[Checkpoint]:
    """Return the complete checkpoints below a directory, earliest first."""
    try:
        found = [path for path in output_dir.iterdir() if path.name.startswith(_PREFIX)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidRequestError("output_dir", f"{output_dir}: {error.strerror}") from error
    whole = map(_read, found)
    return sorted(filter(None, whole), key=lambda checkpoint: checkpoint.step)


def require_checkpoint(field: str, text: str) -> Checkpoint:
    """Return the checkpoint at a directory, or at the weights file inside it."""
    path = Path(text)
    checkpoint = _read(path.parent if path.name == WEIGHTS else path)
    if checkpoint is None:
        parts = f"{WEIGHTS}, {CONFIG} and {STATE}"
        raise InvalidRequestError(field, f"{text!r} is not a checkpoint: it needs {parts}")
    return checkpoint


def is_checkpoint(path: Path) -> bool:
    """Tell whether a training wrote this directory, and completed it."""
    return _read(path) is not None


def base_model(checkpoint: Checkpoint) -> str:
    """Return the model that a checkpoint was trained from."""
    config = json.loads((checkpoint.path / CONFIG).read_text(encoding="utf-8"))
    return str(config.get("model", ""))


def _read(path: Path) -> Checkpoint | None:
    try:
        if not all((path / name).is_file() for name in (WEIGHTS, CONFIG, STATE)):
            return None
        state: Mapping[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        created = datetime.fromtimestamp((path / STATE).stat().st_mtime, UTC)
        return Checkpoint(
            path=path,
            step=int(state["step"]),
            epoch=float(state["epoch"]),
            loss=float(state["loss"]),
            created_at=created.isoformat(timespec="seconds"),
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError):
        return None
