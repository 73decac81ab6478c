"""One node of the prompt cache in a file, in safetensors format.

A file contains the tokens from the root to the node's end, so that it is self-describing. The
arrays are stored as bytes, with their types in the header. Files are read and written through
descriptors, which the library cannot do: a path could lead to another file by the time it is
opened, and truncating a mapped file kills the process.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, BinaryIO

from backend.cache.plain import PlainArray, PlainSegment
from backend.cache.token_key import BYTES_PER_TOKEN, TokenKey

FORMAT = "mlx-backend prompt cache 2"
MAX_HEADER_BYTES = 16 * 2**20
# The first bytes after the header's length, the same in every file.
_MARK = json.dumps({"__metadata__": {"format": FORMAT}})[:-2].encode() + b", "
_LENGTH = struct.Struct("<Q")
_KEY = "key"
# Errors from reading a corrupt header: JSON may be nested deeply, and contain infinite numbers.
_DAMAGE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
    struct.error,
)


class DamagedFileError(Exception):
    """A file does not match its header, or has none."""


@dataclass(frozen=True, slots=True)
class NodeHeader:
    """The header of a node's file.

    Attributes:
        key: The tokens from the root to the node's end.
        start: The node's first position.
        has_snapshot: Whether it includes the state after its last token.
    """

    key: TokenKey
    start: int
    has_snapshot: bool


def is_marked(file: BinaryIO) -> bool:
    """Return whether a file starts as `write_node` starts it, possibly truncated later."""
    return os.pread(file.fileno(), len(_MARK), _LENGTH.size) == _MARK


def write_node(
    file: BinaryIO, fingerprint: str, key: TokenKey, start: int, segment: PlainSegment
) -> None:
    """Write a node.

    Raises:
        OSError: It cannot be written.
    """
    buffers = [memoryview(key.packed), *(_bytes(array) for array in segment.arrays)]
    about = {
        "start": start,
        "outline": segment.outline,
        "arrays": [[array.dtype, array.shape] for array in segment.arrays],
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }
    text = json.dumps(about)
    metadata = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "about": text,
        "checksum": _checksum(text, buffers),
    }
    header = _header_bytes(metadata, [buffer.nbytes for buffer in buffers])
    file.write(_LENGTH.pack(len(header)) + header)
    for buffer in buffers:
        file.write(buffer)


def read_header(file: BinaryIO, fingerprint: str) -> NodeHeader:
    """Read the header without the arrays; the checksum is not verified.

    Raises:
        DamagedFileError: It is damaged, or of another model or version.
        OSError: It cannot be read.
    """
    with _damage_reported():
        metadata, sizes = _read_header(file, fingerprint)
        return _node_header(metadata, _read(file, sizes[0]))


def read_node(file: BinaryIO, fingerprint: str) -> tuple[NodeHeader, PlainSegment]:
    """Read and verify the whole file.

    Raises:
        DamagedFileError: It is damaged, or of another model or version.
        OSError: It cannot be read.
    """
    with _damage_reported():
        metadata, sizes = _read_header(file, fingerprint)
        key, *buffers = [_read(file, size) for size in sizes]
        if _checksum(metadata["about"], [key, *buffers]) != metadata["checksum"]:
            raise DamagedFileError("the checksum does not fit")
        about = json.loads(metadata["about"])
        described = zip(about["arrays"], buffers, strict=True)
        arrays = (PlainArray(kind, tuple(shape), data) for (kind, shape), data in described)
        return _node_header(metadata, key), PlainSegment(about["outline"], tuple(arrays))


@contextmanager
def _damage_reported() -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DamagedFileError(str(error)) from error


def _read_header(file: BinaryIO, fingerprint: str) -> tuple[Mapping[str, str], Sequence[int]]:
    """Return the metadata and the tensor sizes, which the file's length allows."""
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise DamagedFileError(f"a header of {length} bytes")
    raw = bytes(_read(file, length))
    header = json.loads(raw)
    metadata: Mapping[str, str] = header.pop("__metadata__")
    found = metadata.get("format"), metadata.get("fingerprint")
    if found != (FORMAT, fingerprint):
        raise DamagedFileError(f"it is of another model or version: {found}")
    sizes = [tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in header.values()]
    if _header_bytes(metadata, sizes) != raw:
        raise DamagedFileError("its header has changed")
    if os.fstat(file.fileno()).st_size != _LENGTH.size + length + sum(sizes):
        raise DamagedFileError("its length has changed")
    return metadata, sizes


def _header_bytes(metadata: Mapping[str, str], sizes: Sequence[int]) -> bytes:
    """Return the header of a safetensors file: the key's tokens, then the arrays as bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for index, size in enumerate(sizes):
        name, dtype, items = f"array.{index - 1}", "U8", size
        if index == 0:
            name, dtype, items = _KEY, "I64", size // BYTES_PER_TOKEN
        header[name] = {"dtype": dtype, "shape": [items], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % _LENGTH.size)


def _node_header(metadata: Mapping[str, str], key: memoryview) -> NodeHeader:
    about = json.loads(metadata["about"])
    states = json.loads(about["outline"])["states"]
    return NodeHeader(TokenKey(bytes(key)), int(about["start"]), states is not None)


def _read(file: BinaryIO, size: int) -> memoryview:
    left = os.fstat(file.fileno()).st_size
    if not 0 <= size <= left:
        raise DamagedFileError(f"{size} bytes are wanted of {left}")
    buffer = bytearray(size)
    if file.readinto(buffer) != size:  # type: ignore[attr-defined]  # missing in typeshed's BinaryIO
        raise DamagedFileError("it is cut off")
    return memoryview(buffer)


def _bytes(array: PlainArray) -> memoryview:
    return array.data.cast("B") if array.data.nbytes else memoryview(b"")


def _checksum(text: str, buffers: Sequence[memoryview]) -> str:
    total = zlib.crc32(text.encode())
    for buffer in buffers:
        total = zlib.crc32(buffer, total)
    return f"{total:08x}"
