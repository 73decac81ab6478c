"""Resolves the paths in a LoadModel."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from backend.config import ModelOptions


def candidates(text: str, models_dir: Path | None) -> list[Path]:
    """Return the possible locations of a path, best first: hosts send paths below their models."""
    path = Path(text).expanduser()
    if path.is_absolute() or models_dir is None:
        return [path]
    return [models_dir / path, path]


def find_path(text: str, models_dir: Path | None) -> Path | None:
    """Return the first candidate that exists."""
    return next((path for path in candidates(text, models_dir) if path.exists()), None)


def rooted(options: ModelOptions) -> ModelOptions:
    """Return the options with paths that are valid in any working directory."""
    tuning = options.tuning
    models_dir = options.models_dir.absolute() if options.models_dir else None
    return replace(
        options,
        models_dir=models_dir,
        tokenizer=_rooted(options.tokenizer, models_dir),
        adapters=tuple(
            replace(adapter, path=_rooted(adapter.path, models_dir)) for adapter in options.adapters
        ),
        tuning=tuning.updated(
            chat_template=_rooted(tuning.text.chat_template, models_dir),
            cache_dir=_absolute(tuning.prompt_cache.cache_dir),
            hostfile=_absolute(tuning.group.hostfile),
        ),
    )


Text = TypeVar("Text", str, str | None)


def _rooted(text: Text, models_dir: Path | None) -> Text:
    """Return the absolute path that a text names; other text is returned unchanged."""
    if not text:
        return text
    try:
        found = find_path(text, models_dir)
    except (OSError, ValueError):
        # Too long for a path, as a template may be.
        return text
    return str(found.absolute()) if found else text


def _absolute(text: str | None) -> str | None:
    return str(Path(text).expanduser().absolute()) if text else text
