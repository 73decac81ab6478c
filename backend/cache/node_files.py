"""One node of the prompt cache in a file, in safetensors format.

A file contains the tokens from the root to the node's end, so that it is self-describing. The
arrays are stored as bytes, with their types in the header. Files are read and written through
descriptors, which the library cannot do: a path could lead to another file by the time it is
opened, and truncating a mapped file kills the process.

A file that the tier did not write raises `ForeignFileError`, one that is damaged or of another
model `DamagedFileError`, and a refusal of the system `OSError`.
"""

import json
import logging
import os
import re
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from backend.cache.kv import PlainArray, PlainSegment
from backend.cache.radix import BYTES_PER_TOKEN, TokenKey
from common.directories import make_directories, others_may_write

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

log = logging.getLogger(__name__)


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
    """Write a node."""
    buffers = [memoryview(key.packed)]
    # An empty one cannot be cast.
    buffers += [a.data.cast("B") if a.data.nbytes else memoryview(b"") for a in segment.arrays]
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
    """Read the header without the arrays; the checksum is not verified."""
    with _damage_reported():
        metadata, sizes = _read_header(file, fingerprint)
        return _node_header(metadata, _read(file, sizes[0]))


def read_node(file: BinaryIO, fingerprint: str) -> tuple[NodeHeader, PlainSegment]:
    """Read and verify the whole file."""
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


def _checksum(text: str, buffers: Sequence[memoryview]) -> str:
    total = zlib.crc32(text.encode())
    for buffer in buffers:
        total = zlib.crc32(buffer, total)
    return f"{total:08x}"


FOLDER_NAME = "mlx-backend-prompt-cache"
SUFFIX = ".kv"
DAMAGED_SUFFIX = ".damaged"
DRAFT_SUFFIX = ".draft"

_MODEL = re.compile(r"[0-9a-f]{24}")
_FILE = re.compile(r"[0-9]+-[0-9]+-[0-9a-f]{32}(\.kv|\.damaged|\.[0-9a-f]{16}\.draft)")
_LISTED_NAMES = 3
# O_NONBLOCK: opening a pipe must not block.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignFileError(OSError):
    """The path exists, but the disk tier did not write it."""


@dataclass(frozen=True, slots=True, order=True)
class CacheFile:
    """A file written by the disk tier of any process; the oldest sorts first."""

    mtime_ns: int
    size: int
    model: str
    name: str


@dataclass(frozen=True, slots=True)
class _Verdict:
    inode: int
    size: int
    mtime_ns: int
    is_ours: bool


class CacheFolder:
    """The folder of all models; file names refer to one of them."""

    def __init__(self, root: Path, model: str) -> None:
        """Create the folder.

        Raises:
            ValueError: `model` is not a fingerprint.
        """
        if not _MODEL.fullmatch(model):
            raise ValueError(f"{model!r} is no fingerprint")
        self.path = root / FOLDER_NAME
        self._model = model
        self._verdicts: dict[tuple[str, str], _Verdict] = {}
        with self._made():
            _refuse_foreign_files(self.path)

    def files(self) -> list[CacheFile]:
        """Return the files of all models, with damaged ones and leftovers of killed writers."""
        found: dict[tuple[str, str], _Verdict] = {}
        for model in self._models():
            with suppress(FileNotFoundError), self._opened(model) as folder:
                for entry in _regular_files(folder):
                    verdict = self._judge(folder, model, entry)
                    if verdict is not None:
                        found[model, entry.name] = verdict
        self._verdicts = found
        return [
            CacheFile(verdict.mtime_ns, verdict.size, model, name)
            for (model, name), verdict in found.items()
            if verdict.is_ours
        ]

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of the model."""
        with self._opened(self._model) as folder, _reading(folder, name) as file:
            yield file

    def write(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write a file atomically."""
        draft = f"{name.removesuffix(SUFFIX)}.{secrets.token_hex(8)}{DRAFT_SUFFIX}"
        with self._made() as folder, _draft(folder, draft) as file:
            write(file)
            file.flush()
            _require_ours_or_none(folder, name)
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)

    def put_aside(self, name: str) -> None:
        """Rename a damaged file of the model."""
        aside = name.removesuffix(SUFFIX) + DAMAGED_SUFFIX
        with self._opened(self._model) as folder:
            _require_ours(folder, name)
            _require_ours_or_none(folder, aside)
            os.replace(name, aside, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, file: CacheFile) -> None:
        """Remove a file of any model, unless it is gone."""
        with suppress(FileNotFoundError), self._opened(file.model) as folder:
            _require_ours(folder, file.name)
            os.unlink(file.name, dir_fd=folder)

    def touch(self, name: str) -> None:
        """Make a file of the model the latest, if it is there."""
        with suppress(OSError), self.reading(name) as file:
            os.utime(file.fileno())

    @contextmanager
    def _made(self) -> Iterator[int]:
        """Open the folder of the model, created again if it was removed."""
        make_directories(self.path.parent)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        with _folder(self.path) as own:
            with suppress(FileExistsError):
                os.mkdir(self._model, mode=0o700, dir_fd=own)
            with _folder(self._model, own) as folder:
                yield folder

    @contextmanager
    def _opened(self, model: str) -> Iterator[int]:
        with _folder(self.path) as own, _folder(model, own) as folder:
            yield folder

    def _models(self) -> list[str]:
        with suppress(FileNotFoundError), _folder(self.path) as own, os.scandir(own) as entries:
            return [e.name for e in entries if _MODEL.fullmatch(e.name) and _is_folder(e)]
        return []

    def _judge(self, folder: int, model: str, entry: os.DirEntry[str]) -> _Verdict | None:
        """Tell whether the tier wrote a file; its head is read once, and again after a change."""
        try:
            status = entry.stat(follow_symlinks=False)
            known = self._verdicts.get((model, entry.name))
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if known is not None and (known.inode, known.size, known.mtime_ns) == seen:
                return known
            is_ours = _is_ours(folder, entry.name)
        except FileNotFoundError:
            return None
        if not is_ours and not entry.name.endswith(DRAFT_SUFFIX):
            log.warning(
                "prompt cache: %s is left alone: this backend did not write it",
                self.path / model / entry.name,
            )
        return _Verdict(*seen, is_ours)


def require_own_folder(root: Path) -> None:
    """Have no folder of caches in a directory, or one that `CacheFolder` takes.

    Raises:
        OSError: Others can write to it, or it contains files not written by the disk tier.
    """
    with suppress(FileNotFoundError):
        _refuse_foreign_files(root / FOLDER_NAME)


def _refuse_foreign_files(path: Path) -> None:
    foreign = sorted(_foreign_files(path))
    if foreign:
        names = ", ".join(foreign[:_LISTED_NAMES])
        more = len(foreign) - _LISTED_NAMES
        names += f" and {more} more" if more > 0 else ""
        raise ForeignFileError(
            f"{path} holds what this backend did not write: {names}. "
            "Move it elsewhere, or name another directory"
        )


def _foreign_files(path: Path) -> Iterator[str]:
    with _folder(path) as own, os.scandir(own) as entries:
        for model in filter(_is_visible, entries):
            if not (_MODEL.fullmatch(model.name) and _is_folder(model)):
                yield model.name
                continue
            with suppress(FileNotFoundError), _folder(model.name, own) as folder:
                ours = {entry.name for entry in _regular_files(folder)}
                with os.scandir(folder) as files:
                    names = [e.name for e in files if _is_visible(e)]
                yield from (f"{model.name}/{name}" for name in names if name not in ours)


@contextmanager
def _folder(path: str | Path, inside: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, _OPEN_FOLDER, dir_fd=inside)
    try:
        # The files become state of the model.
        if inside is None and others_may_write(os.fstat(descriptor)):
            raise ForeignFileError(f"{path} is another user's, or others can write to it")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _draft(folder: int, name: str) -> Iterator[BinaryIO]:
    with os.fdopen(os.open(name, _CREATE, 0o600, dir_fd=folder), "wb") as file:
        try:
            yield file
        except BaseException:
            os.unlink(name, dir_fd=folder)
            raise


@contextmanager
def _reading(folder: int, name: str) -> Iterator[BinaryIO]:
    with os.fdopen(os.open(name, _READ, dir_fd=folder), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or not is_marked(file):
            raise ForeignFileError(f"{name} was not written by this backend")
        yield file


def _is_ours(folder: int, name: str) -> bool:
    try:
        with _reading(folder, name):
            return True
    except FileNotFoundError:
        raise
    except OSError:
        return False


def _require_ours(folder: int, name: str) -> None:
    with _reading(folder, name):
        pass


def _require_ours_or_none(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        _require_ours(folder, name)


def _regular_files(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [e for e in entries if _FILE.fullmatch(e.name) and e.is_file(follow_symlinks=False)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_visible(entry: os.DirEntry[str]) -> bool:
    """Return false for hidden files, which file managers and network disks leave anywhere."""
    return not entry.name.startswith(".")
