"""Fine-tuning checkpoints: directories that LoadModel accepts as adapters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backend.errors import InvalidRequestError

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
    """Return the complete checkpoints below a directory, earliest first.

    Raises:
        InvalidRequestError: The directory cannot be read; a missing one counts as empty.
    """
    try:
        found = [path for path in output_dir.iterdir() if path.name.startswith(_PREFIX)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidRequestError("output_dir", f"{output_dir}: {error.strerror}") from error
    whole = map(_read, found)
    return sorted(filter(None, whole), key=lambda checkpoint: checkpoint.step)


def require_checkpoint(field: str, text: str) -> Checkpoint:
    """Return the checkpoint at a directory, or at the weights file inside it.

    Raises:
        InvalidRequestError: There is none, or it is incomplete.
    """
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
