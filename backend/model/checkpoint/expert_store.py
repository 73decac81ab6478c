"""The file with the experts of a mixture, each with a checksum, for reading one at a time.

It is written once, from a network as the loader has made it: the same for every family, data type
and adapter. Records come first, in the order of layers and experts, then a table, then the table's
length. A draft becomes the store only when it is whole.
"""

import fcntl
import json
import logging
import os
import secrets
import shutil
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from backend.errors import DiskFullError, LoadError
from common.machine_memory import in_words

STORE_NAME = "experts.store"

_MARK = b"mlx-backend experts 1\n"
_LENGTH = struct.Struct("<Q")
_REPORT_INTERVAL_S = 5.0
_READERS = 4
# Records that are being read, or have been, before they are asked for.
_AHEAD = 2 * _READERS
# To measure a disk's rate: the bytes of a piece, the number of pieces, and a limit of time.
_PIECE, _PIECES, _RATE_S = 2**20, 256, 1.0
# NumPy has no bfloat16.
_PLAIN_TYPES = {mx.bfloat16: mx.uint16}

Arrays: TypeAlias = Mapping[str, mx.array]

Key: TypeAlias = tuple[int, int]
"""The number of a layer, and that of an expert in it."""

log = logging.getLogger(__name__)


class DamagedExpertsError(RuntimeError):
    """A record of the store is not the one that was written; the file is removed."""


class ExpertLayer:
    """The matrices of one linear layer of all experts.

    Attributes:
        path: The layer's place in the network.
        count: Experts.
        types: Data type and shape of an expert's arrays, by name.
        used: Experts of a token, once a pass has shown it.
    """

    def __init__(self, path: str, arrays: Arrays) -> None:
        """Describe a layer.

        Args:
            path: The layer's place in the network.
            arrays: Of all experts, each [experts, ...]; they may be lazy.
        """
        self.path = path
        self.count, self.used = len(next(iter(arrays.values()))), 0
        self.types = {name: (each.dtype, each.shape[1:]) for name, each in arrays.items()}
        self.sizes = {name: each.nbytes // self.count for name, each in arrays.items()}
        self.record_bytes = sum(self.sizes.values())

    @property
    def described(self) -> str:
        """All that the layout of its records depends on."""
        types = {name: (str(dtype), shape) for name, (dtype, shape) in self.types.items()}
        return f"{self.path} {self.count} {types}"

    def arrays(self, record: bytearray) -> dict[str, mx.array]:
        """Return an expert's arrays, each [1, ...], from the bytes of a record."""
        found, start, whole = {}, 0, memoryview(record)
        for name, (dtype, shape) in self.types.items():
            numbers = np.frombuffer(whole[start : start + self.sizes[name]], _plain_type(dtype))
            # A view of numbers of this size is no copy.
            found[name] = mx.array(numbers.reshape(1, *shape)).view(dtype)
            start += self.sizes[name]
        return found


class ExpertStore:
    """An open store; records may be read on several threads."""

    def __init__(self, path: Path, layers: Sequence[ExpertLayer], key: str) -> None:
        """Open a file.

        Raises:
            LoadError: It is missing, cut off, or of other weights.
        """
        self.path = path
        self._layers = layers
        sizes = [layer.record_bytes for layer in layers for _ in range(layer.count)]
        self._starts = np.cumsum([len(_MARK), *sizes])
        self._firsts = np.cumsum([0, *(layer.count for layer in layers)])
        try:
            # A pipe must not be waited for.
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._checksums = self._read_table(key)
        except (OSError, ValueError, KeyError, struct.error) as error:
            os.close(self._file)
            raise LoadError(f"{path} is no store of these experts: {error}") from error

    def read(self, layer: int, expert: int) -> bytearray:
        """Return the bytes of an expert.

        Raises:
            DamagedExpertsError: They are not those that were written.
        """
        number = int(self._firsts[layer]) + expert
        start, end = (int(each) for each in self._starts[number : number + 2])
        record = bytearray(end - start)
        try:
            is_whole = _fill(self._file, memoryview(record), start)
        except OSError as error:
            raise DamagedExpertsError(f"{self.path} cannot be read: {error.strerror}") from error
        if not is_whole or zlib.crc32(record) != self._checksums[number]:
            # The next load writes it anew.
            self.path.unlink(missing_ok=True)
            place = f"expert {expert} of {self._layers[layer].path}"
            raise DamagedExpertsError(f"{self.path} is damaged: {place}; loading writes it anew")
        return record

    def _read_table(self, key: str) -> list[int]:
        size = os.fstat(self._file).st_size
        end = int(self._starts[-1])
        tail = os.pread(self._file, _LENGTH.size, size - _LENGTH.size)
        (length,) = _LENGTH.unpack(tail)
        if os.pread(self._file, len(_MARK), 0) != _MARK or end + length + _LENGTH.size != size:
            raise ValueError("its size is not that of a whole one")
        table = json.loads(os.pread(self._file, length, end))
        if table["key"] != key:
            raise ValueError("it was made of other weights")
        return [int(each) for each in table["checksums"]]


class ReadAhead:
    """Reads records of a store on some threads; for use by one thread."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._readers = ThreadPoolExecutor(_READERS, "experts")
        self._planned: deque[Key] = deque()
        self._begun: dict[Key, Future[bytearray]] = {}

    def plan(self, keys: Iterable[Key]) -> None:
        """Begin to read records, which will be taken in this order; forgets an earlier plan."""
        for read in self._begun.values():
            read.cancel()
        self._begun.clear()
        self._planned = deque(keys)
        self._go_on()

    def take(self, key: Key) -> bytearray:
        """Return the bytes of an expert, planned or not.

        Raises:
            DamagedExpertsError: They are not those that were written.
        """
        read = self._begun.pop(key, None) or self._readers.submit(self._store.read, *key)
        self._go_on()
        return read.result()

    def _go_on(self) -> None:
        while self._planned and len(self._begun) < _AHEAD:
            key = self._planned.popleft()
            self._begun[key] = self._readers.submit(self._store.read, *key)


def read_rate(files: Sequence[Path]) -> float:
    """Return the bytes/s that a disk gives to several readers; reads some of the files, uncached.

    Raises:
        OSError: A file cannot be read.
    """
    with ExitStack() as opened, ThreadPoolExecutor(_READERS) as readers:
        numbers = [opened.enter_context(path.open("rb")).fileno() for path in files]
        for number in numbers:
            _leave_page_cache(number)
        places = ((n, start) for n in numbers for start in range(0, os.fstat(n).st_size, _PIECE))
        started_at = time.monotonic()

        def read(place: tuple[int, int]) -> int:
            is_over = time.monotonic() - started_at > _RATE_S
            return 0 if is_over else len(os.pread(place[0], _PIECE, place[1]))

        done = sum(readers.map(read, islice(places, _PIECES)))
        return done / (time.monotonic() - started_at)


def _leave_page_cache(file: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, _PIECE * _PIECES, os.POSIX_FADV_DONTNEED)
    elif hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)


def _fill(file: int, buffer: memoryview, start: int) -> bool:
    """Read into a buffer; false if the file ends before."""
    done = 0
    while done < len(buffer):
        read = os.preadv(file, [buffer[done:]], start + done)
        if not read:
            return False
        done += read
    return True


def open_store(
    folders: Sequence[Path],
    layers: Sequence[ExpertLayer],
    sources: Sequence[dict[str, mx.array]],
    key: str,
) -> ExpertStore:
    """Return the store of some layers, written now unless one of the folders has it.

    Args:
        folders: The first in which a file can be made gets a new one.
        layers: In the order of their records.
        sources: The lazy arrays of each layer, which are let go as they are written.
        key: Of all that determines the arrays.

    Raises:
        DiskFullError: There is no room for it.
        LoadError: No folder can be written to.
    """
    for folder in folders:
        path = folder / STORE_NAME
        if path.exists():
            try:
                return ExpertStore(path, layers, key)
            except LoadError as error:
                log.warning("%s; it is written anew", error)
    folder_to_write = next((each for each in folders if _is_writable(each)), None)
    if folder_to_write is None:
        places = " nor ".join(map(str, folders))
        raise LoadError(f"their store cannot be written to {places}", field="experts")
    path = folder_to_write / STORE_NAME
    if not _is_ours(path):
        problem = f"{path} is in the way: this backend has not written it"
        raise LoadError(problem, field="experts")
    _write(path, layers, sources, key)
    return ExpertStore(path, layers, key)


def _is_ours(path: Path) -> bool:
    """Tell whether a file, if there is one, begins as all stores and drafts do."""
    if not path.is_symlink() and not path.exists():
        return True
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb") as opened:  # noqa: PTH123 (a descriptor)
            return opened.read(len(_MARK)) == _MARK
    return False


def _is_writable(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


def _write(
    path: Path, layers: Sequence[ExpertLayer], sources: Sequence[dict[str, mx.array]], key: str
) -> None:
    size = sum(layer.count * layer.record_bytes for layer in layers)
    # A stale store is of no use, and may be as large.
    path.unlink(missing_ok=True)
    _remove_drafts(path)
    if size > (free := shutil.disk_usage(path.parent).free):
        raise DiskFullError(
            f"their store takes {in_words(size)}, and {path.parent} has {in_words(free)}",
            field="experts",
        )
    log.info("writing %s of experts to %s, once for this checkpoint", in_words(size), path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("xb") as file:
            # Others leave it alone while it is being written.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(_MARK)
            file.flush()
            checksums = []
            for record in _with_reports(_records(layers, sources), size):
                checksums.append(zlib.crc32(record))
                file.write(record)
            table = json.dumps({"key": key, "checksums": checksums}).encode()
            file.write(table + _LENGTH.pack(len(table)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise DiskFullError(problem, field="experts") from error
    finally:
        draft.unlink(missing_ok=True)


def _remove_drafts(path: Path) -> None:
    """Remove drafts of processes that were killed: nobody has locked them."""
    for draft in path.parent.glob(f".{path.name}.*"):
        if _is_ours(draft):
            with suppress(OSError), draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()


def _records(
    layers: Sequence[ExpertLayer], sources: Sequence[dict[str, mx.array]]
) -> Iterator[bytes]:
    """Yield the experts of each layer; the matrices of one layer are in memory at a time."""
    for layer, arrays in zip(layers, sources, strict=True):
        mx.eval(list(arrays.values()))
        plain = [_plain(arrays.pop(name)) for name in layer.types]
        for expert in range(layer.count):
            yield b"".join(each[expert].tobytes() for each in plain)
        del plain
        mx.clear_cache()


def _plain(array: mx.array) -> np.ndarray[Any, Any]:
    kind = _PLAIN_TYPES.get(array.dtype)
    return np.array(array.view(kind) if kind else array, copy=False)


def _plain_type(dtype: mx.Dtype) -> np.dtype[Any]:
    """Return NumPy's type of the numbers that `_plain` makes of those of MLX's."""
    return np.dtype(str(_PLAIN_TYPES.get(dtype, dtype)).removeprefix("mlx.core."))


def _with_reports(records: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Log how much of all bytes has been passed on."""
    done, reported_at = 0, time.monotonic()
    for record in records:
        yield record
        done += len(record)
        if time.monotonic() - reported_at >= _REPORT_INTERVAL_S:
            reported_at = time.monotonic()
            log.info("%.0f %% of the experts are written", 100 * done / size)
