"""Checks safetensors files by their headers before MLX reads them."""

import json
import stat
from pathlib import Path
from typing import Any, BinaryIO

from backend.errors import LoadError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20
_LFS_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"


def require_whole(path: Path) -> None:
    """Check that a file holds all tensors listed in its header; reads only the header.

    Raises:
        LoadError: It does not; the message names the file and a remedy.
    """
    size = require_regular(path)
    if size == 0:
        raise LoadError(f"{path} is empty: download it again")
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise LoadError(
                f"{path} is a git-lfs pointer, not the weights: `git lfs pull` fetches them"
            )
        file.seek(0)
        needed = _needed_bytes(file, size)
    if needed is None:
        raise LoadError(f"{path} is not a safetensors file: its header cannot be read")
    if size < needed:
        raise LoadError(f"{path} is truncated: it has {size} of {needed} bytes; download it again")


def require_regular(path: Path) -> int:
    """Return the size of a regular file.

    Raises:
        LoadError: It is a pipe, a device or a directory: reading a pipe might never begin.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{path} is not a regular file")
    return status.st_size


def _needed_bytes(file: BinaryIO, size: int) -> int | None:
    """Return the required length of a file in bytes, or `None` if its header cannot be read."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 0 < length <= _MAX_HEADER_BYTES:
        return None
    if size < (begin := _LENGTH_BYTES + length):
        return begin
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        ends = [int(row["data_offsets"][1]) for name, row in header.items() if name != _METADATA]
    except (AttributeError, KeyError, LookupError, TypeError, ValueError):
        return None
    return begin + max(ends, default=0)
