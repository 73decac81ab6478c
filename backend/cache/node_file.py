"""One node of the prompt cache in a safetensors file.

The tokens from the root to the node's end are in the file, so that a file tells by itself which
prompts it is for. The arrays are kept as bytes: their types stand in the header.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from backend.cache.plain import PlainArray, PlainSegment
from backend.cache.token_key import TokenKey

FORMAT_VERSION = "1"
SUFFIX = ".safetensors"
DRAFT_SUFFIX = ".draft"
_KEY = "key"
# What reading a spoilt header raises; JSON may be nested deeply, and hold infinite numbers.
_DAMAGE = (
    SafetensorError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)

Tensor: TypeAlias = "np.ndarray[Any, Any]"


class DamagedFileError(Exception):
    """A file is not what its header says, or has none."""


@dataclass(frozen=True, slots=True)
class NodeHeader:
    """What a file says of its node.

    Attributes:
        key: The tokens from the root to the node's end.
        start: Where the node begins.
        has_snapshot: Whether the state behind its last token is there.
    """

    key: TokenKey
    start: int
    has_snapshot: bool


def write_node(
    path: Path, fingerprint: str, key: TokenKey, start: int, segment: PlainSegment
) -> None:
    """Write a file, which is there as a whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    tensors = {_name(i): _bytes(array) for i, array in enumerate(segment.arrays)}
    tensors[_KEY] = np.frombuffer(key.packed, np.int64)
    about = {
        "start": start,
        "outline": segment.outline,
        "arrays": [[array.dtype, array.shape] for array in segment.arrays],
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }
    text = json.dumps(about)
    metadata = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "about": text,
        "checksum": _checksum(text, tensors.values()),
    }
    draft = path.with_suffix(f".{os.getpid()}{DRAFT_SUFFIX}")
    try:
        save_file(tensors, draft, metadata)
        draft.replace(path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        draft.unlink(missing_ok=True)


def read_header(path: Path, fingerprint: str) -> NodeHeader:
    """Read what the file is for, and not its arrays; nothing is checked against the checksum.

    Raises:
        DamagedFileError: It is damaged, or of another model or version.
        OSError: It cannot be read, or somebody has removed it.
    """
    with _damage_reported(), safe_open(path, framework="np") as file:
        return _header(_metadata(file, fingerprint), file.get_tensor(_KEY))


def read_node(path: Path, fingerprint: str) -> tuple[NodeHeader, PlainSegment]:
    """Read all of it and check it.

    Raises:
        DamagedFileError: It is damaged, or of another model or version.
        OSError: It cannot be read, or somebody has removed it.
    """
    with _damage_reported(), safe_open(path, framework="np") as file:
        metadata = _metadata(file, fingerprint)
        about = json.loads(metadata["about"])
        tensors = [file.get_tensor(_name(i)) for i in range(len(about["arrays"]))]
        key = file.get_tensor(_KEY)
        if _checksum(metadata["about"], [*tensors, key]) != metadata["checksum"]:
            raise DamagedFileError("the checksum does not fit")
        described = zip(about["arrays"], tensors, strict=True)
        arrays = (PlainArray(kind, tuple(shape), memoryview(t)) for (kind, shape), t in described)
        return _header(metadata, key), PlainSegment(about["outline"], tuple(arrays))


@contextmanager
def _damage_reported() -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DamagedFileError(str(error)) from error


def _metadata(file: Any, fingerprint: str) -> Mapping[str, str]:  # noqa: ANN401 (untyped upstream)
    metadata: Mapping[str, str] = file.metadata() or {}
    found = metadata.get("format_version"), metadata.get("fingerprint")
    if found != (FORMAT_VERSION, fingerprint):
        raise DamagedFileError(f"it is of another model or version: {found}")
    return metadata


def _header(metadata: Mapping[str, str], key: Tensor) -> NodeHeader:
    about = json.loads(metadata["about"])
    states = json.loads(about["outline"])["states"]
    return NodeHeader(TokenKey(key.tobytes()), int(about["start"]), states is not None)


def _bytes(array: PlainArray) -> Tensor:
    return np.frombuffer(array.data.cast("B") if array.data.nbytes else b"", np.uint8)


def _checksum(text: str, tensors: Iterable[Tensor]) -> str:
    total = zlib.crc32(text.encode())
    for tensor in tensors:
        total = zlib.crc32(tensor.data, total)
    return f"{total:08x}"


def _name(index: int) -> str:
    return f"array.{index}"
