"""Every file of a checkpoint that a library might read, checked before one sees the directory.

Libraries open whatever has the right name: a pipe never ends, a huge file takes all memory, and
deeply nested JSON exhausts the stack.
"""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from backend.config import MAX_CHECKPOINT_JSON_DEPTH, ModelOptions
from backend.errors import LoadError
from backend.model.checkpoint.adapter_files import adapter_directory, require_readable
from backend.model.checkpoint.config_file import read_config, require_weights

_MIB = 2**20
# By suffix; names win. Weights have no limit of their own: memory is checked later.
_LIMITS = {
    ".json": 16 * _MIB,
    ".jinja": 4 * _MIB,
    ".txt": 256 * _MIB,
    ".model": 256 * _MIB,
    ".tiktoken": 256 * _MIB,
    ".py": 4 * _MIB,
}
_LIMITS_BY_NAME = {
    "tokenizer.json": 256 * _MIB,
    "vocab.json": 256 * _MIB,
    "model.safetensors.index.json": 64 * _MIB,
}
_WEIGHTS = ".safetensors"
# Larger ones are vocabularies and lists of tensors: those who read them look at their depth.
_PARSED_BYTES = 4 * _MIB


def require_sound(directory: Path) -> None:
    """Refuse a directory with a file that a library must not open.

    Raises:
        LoadError: A file is no regular file, is too large, or is JSON that is nested too deeply;
            the message names it.
    """
    for entry in _entries(directory):
        path = Path(entry.path)
        limit = _LIMITS_BY_NAME.get(entry.name, _LIMITS.get(path.suffix))
        if limit is None and path.suffix != _WEIGHTS:
            continue
        size = _regular_size(path)
        if size is None or limit is None:
            continue
        if size > limit:
            raise LoadError(
                f"{path} has {size} bytes, more than the {limit} that such a file may have"
            )
        if path.suffix == ".json" and size <= _PARSED_BYTES:
            _require_shallow(path)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of the directory and of those inside it, one level deep."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inner:
                        yield from inner
    except OSError as error:
        raise LoadError(f"{directory} cannot be read: {error.strerror}") from error


def _regular_size(path: Path) -> int | None:
    """Return the size of a regular file, through links; `None` if nothing is there.

    Raises:
        LoadError: It is something else.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{path} is not a regular file")
    return status.st_size


def _require_shallow(path: Path) -> None:
    """Refuse nested JSON; what is no JSON is for its reader to refuse."""
    try:
        level = [json.loads(path.read_bytes())]
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError:
        return
    for _ in range(MAX_CHECKPOINT_JSON_DEPTH):
        level = [each for value in level for each in _members(value)]
        if not level:
            return
    raise _too_deep(path)


def _members(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _too_deep(path: Path) -> LoadError:
    return LoadError(f"{path} is nested more than {MAX_CHECKPOINT_JSON_DEPTH} levels deep")


def require_loadable(options: ModelOptions, directory: Path) -> None:
    """Refuse a load that cannot work.

    Args:
        options: Of the load.
        directory: Of the model.

    Raises:
        LoadError: The message names the file, the field or the option.
    """
    require_sound(directory)
    read_config(directory)
    require_weights(directory)
    if draft := options.tuning.speculation.draft_model:
        require_sound(Path(draft))
    for adapter in options.adapters:
        place = adapter_directory(adapter, options.models_dir)
        require_sound(place)
        require_readable(place)
