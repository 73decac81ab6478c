"""Checks safetensors files by their headers before MLX reads them."""

import json
import math
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from backend.errors import LoadError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20
_LFS_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"
# Of the types that MLX reads; it refuses others by name.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


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
        spans = sorted(_span(row) for name, row in header.items() if name != _METADATA)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None
    # Tensors follow one another without a gap, as the format has it.
    end = 0
    for first, last in spans:
        if first != end:
            return None
        end = last
    return begin + end


def _span(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a tensor begins and ends, in bytes after the header.

    Raises:
        ValueError: It has another size than its shape and type.
    """
    first, last = row["data_offsets"]
    shape: Sequence[int] = row["shape"]
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError
    bits = _BITS.get(row["dtype"])
    if last < first or (bits and math.prod(shape) * bits != 8 * (last - first)):
        raise ValueError
    return first, last
