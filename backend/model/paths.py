"""Where the paths of a LoadModel are looked up."""

from pathlib import Path


def candidates(text: str, models_dir: Path | None) -> list[Path]:
    """Return where a path may lie, first choice first: hosts send paths below their models."""
    path = Path(text).expanduser()
    if path.is_absolute() or models_dir is None:
        return [path]
    return [models_dir / path, path]


def find_path(text: str, models_dir: Path | None) -> Path | None:
    """Return the first candidate that exists."""
    return next((path for path in candidates(text, models_dir) if path.exists()), None)
