"""The nodes of one model on disk: found by prefix, limited in bytes, shared with others.

Several processes may use a directory: files appear as a whole, a removed file is a miss, and
files of others are found at the next refresh.
"""

import errno
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

from backend.cache.kv import PlainSegment
from backend.cache.node_files import (
    SUFFIX,
    CacheFile,
    CacheFolder,
    DamagedFileError,
    NodeHeader,
    read_header,
    read_node,
    write_node,
)
from backend.cache.radix import RadixTree, TokenKey
from backend.core.metric_table import Values
from common.log import Seldom

# Between lines of the log about a full disk.
FULL_INTERVAL_S = 60.0
_DIGEST_BYTES = 16
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Clocks of machines that share a directory differ by less.
_CLOCK_TOLERANCE_NS = 3600 * 10**9
# A full disk is freed of this multiple of a node's bytes: its header needs room too.
_ROOM_ON_FULL_DISK = 2

log = logging.getLogger(__name__)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node on disk, from position `start` on, with the tokens from the root to its end."""

    key: TokenKey
    start: int
    segment: PlainSegment


@dataclass(frozen=True, slots=True)
class _FileSpan:
    """Consecutive tokens of a file.

    Attributes:
        ends_file: Whether the last of them is the file's last.
        snapshot_name: A file with only the state after them.
    """

    name: str
    ends_file: bool = True
    snapshot_name: str = ""

    def split(self, at: int) -> "tuple[_FileSpan, _FileSpan]":  # noqa: ARG002 (any place will do)
        return _FileSpan(self.name, ends_file=False), self

    def joined(self, other: "_FileSpan") -> None:  # noqa: ARG002 (never)
        return None


class NodeDirectory:
    """The files of one model below a directory of many; belongs to one thread.

    Attributes:
        bytes: The size of the files of all models at the last refresh.
    """

    def __init__(self, root: Path, fingerprint: str, budget_bytes: int) -> None:
        """Create a folder in the directory; nothing else in the directory is ever touched.

        Args:
            budget_bytes: The maximum size of the files of all models.

        Raises:
            OSError: The folder cannot be created, or contains files not written by the disk tier.
        """
        self._folder = CacheFolder(root, fingerprint)
        self._fingerprint = fingerprint
        self._budget_bytes = budget_bytes
        self._headers: dict[str, NodeHeader] = {}
        self._index: RadixTree[_FileSpan] = RadixTree()
        self._orphans: set[str] = set()
        self._lost: list[NodeHeader] = []
        self._full = Seldom(FULL_INTERVAL_S)
        self.bytes = self.damaged = self.written_bytes = 0

    @property
    def path(self) -> Path:
        """The folder of all models."""
        return self._folder.path

    def look_again(self) -> None:
        """Add new files to the index, and drop removed ones."""
        files = self._folder.files()
        self.bytes = sum(file.size for file in files)
        there = {file.name for file in files if self._is_node(file)}
        gone = self._headers.keys() - there
        new = there - self._headers.keys()
        self._lost += [self._headers.pop(name) for name in gone]
        for name in new:
            self._read_header(name)
        if gone:
            self._reindex()
        elif new:
            self._index_files(new)

    def write(self, node: StoredNode) -> None:
        """Write a node, unless it exists or exceeds the budget; the oldest files make room.

        They also make room on a disk that is full, once for each node.

        Raises:
            OSError: The disk refuses.
        """
        header = NodeHeader(node.key, node.start, node.segment.has_snapshot)
        if self._has(header):
            return
        # Unless it gets written.
        self._lost.append(header)
        if node.segment.nbytes > self._budget_bytes:
            return
        self._make_room(node.segment.nbytes, self._budget_bytes)
        name = _name(node)
        try:
            self._write(name, node)
        except OSError as error:
            if error.errno not in _FULL or node.segment.nbytes > self.bytes:
                raise
            if self._full.is_due():
                log.info("prompt cache: the oldest files make room for new ones: %s", error)
            room = _ROOM_ON_FULL_DISK * node.segment.nbytes
            self._make_room(min(room, self.bytes), self.bytes)
            self._write(name, node)
        self._lost.remove(header)
        self.bytes += node.segment.nbytes
        self.written_bytes += node.segment.nbytes
        self._headers[name] = header
        self._index_files([name])
        self._touch(node.key)

    def read(self, key: TokenKey, known: int, *, ends_at_snapshot: bool) -> list[StoredNode]:
        """Return the nodes on the path of a prompt beyond its known tokens.

        Args:
            known: The number of its tokens that need not be read.
            ends_at_snapshot: Whether nodes after the last snapshot are useless.
        """
        self.look_again()
        nodes: list[StoredNode] = []
        for name in self._names(key, known, ends_at_snapshot=ends_at_snapshot):
            node = self._read(name)
            if node is None:
                break
            nodes.append(node)
        self._touch(key)
        return nodes

    def take_lost(self) -> list[NodeHeader]:
        """Return the nodes not written, or lost, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def __len__(self) -> int:
        """Return the number of this model's files."""
        return len(self._headers)

    def _names(self, key: TokenKey, known: int, *, ends_at_snapshot: bool) -> Sequence[str]:
        found = self._index.match(key)
        spans = [(node.value, node.end) for node in found.nodes]
        if ends_at_snapshot:
            while spans and not self._is_snapshot(
                *spans[-1], limit=min(len(key) - 1, found.length)
            ):
                spans.pop()
        beyond = [span for span, end in spans if end > known]
        names = [name for span in beyond for name in (span.name, span.snapshot_name) if name]
        return list(dict.fromkeys(names))

    def _is_snapshot(self, span: _FileSpan, end: int, *, limit: int) -> bool:
        has_own = span.ends_file and self._headers[span.name].has_snapshot
        return end <= limit and (has_own or bool(span.snapshot_name))

    def _has(self, wanted: NodeHeader) -> bool:
        """Tell whether files hold all of a node, possibly split differently."""
        known = self._headers.get(_name(wanted))
        if known is not None and known.has_snapshot >= wanted.has_snapshot:
            return True
        found = self._index.match(wanted.key)
        last = found.last
        if last is None or found.length < len(wanted.key):
            return False
        return not wanted.has_snapshot or self._is_snapshot(
            last.value, last.end, limit=found.length
        )

    def _read(self, name: str) -> StoredNode | None:
        found = self._read_once(name, read_node)
        return None if found is None else StoredNode(found[0].key, found[0].start, found[1])

    def _read_header(self, name: str) -> None:
        if header := self._read_once(name, read_header):
            self._headers[name] = header

    def _read_once(self, name: str, read: Callable[[BinaryIO, str], Found]) -> Found | None:
        try:
            with self._folder.reading(name) as file:
                return read(file, self._fingerprint)
        except DamagedFileError as error:
            self._quarantine(name, error)
        except OSError as error:
            log.info("prompt cache: %s cannot be read: %s", name, error)
            self._forget([name])
        return None

    def _quarantine(self, name: str, error: DamagedFileError) -> None:
        log.warning("prompt cache: %s is damaged and put aside: %s", name, error)
        self.damaged += 1
        try:
            self._folder.put_aside(name)
        except OSError as problem:
            log.info("prompt cache: %s cannot be put aside: %s", name, problem)
        self._forget([name])

    def _forget(self, names: Iterable[str]) -> None:
        known = [header for name in names if (header := self._headers.pop(name, None))]
        self._lost += known
        if known:
            self._reindex()

    def _reindex(self) -> None:
        self._index = RadixTree()
        self._index_files(self._headers)

    def _index_files(self, names: Iterable[str]) -> None:
        """Add files to the index, parents first; one whose parent is missing waits for it."""
        waiting = self._orphans.union(names) & self._headers.keys()
        self._orphans = set()
        for name in sorted(waiting, key=lambda name: self._headers[name].start):
            header = self._headers[name]
            length = self._index.match(header.key).length
            if length < header.start:
                self._orphans.add(name)
            elif length < len(header.key):
                self._index.insert(header.key, length, _FileSpan(name))
            elif header.has_snapshot and header.start == length:
                self._index_snapshot(name, header.key)

    def _index_snapshot(self, name: str, key: TokenKey) -> None:
        node = self._index.match(key).nodes[-1]
        if node.end > len(key):
            node = self._index.split_at(node, len(key) - node.start)
        self._index.replace(node, replace(node.value, snapshot_name=name))

    def _touch(self, key: TokenKey) -> None:
        """Make the files of a path the most recent, those nearer to the root last."""
        for node in reversed(self._index.match(key).nodes):
            for name in filter(None, (node.value.snapshot_name, node.value.name)):
                self._folder.touch(name)

    def _write(self, name: str, node: StoredNode) -> None:
        def write(file: BinaryIO) -> None:
            write_node(file, self._fingerprint, node.key, node.start, node.segment)

        self._folder.write(name, write)

    def _make_room(self, needed: int, budget_bytes: int) -> None:
        # A clock that was set back has left files of the future, which would stay for ever.
        latest = time.time_ns() + _CLOCK_TOLERANCE_NS
        files = sorted(self._folder.files(), key=lambda file: (file.mtime_ns <= latest, file))
        total = sum(file.size for file in files)
        removed = []
        for file in files:
            if total + needed <= budget_bytes:
                break
            self._folder.remove(file)
            removed.append(file)
            total -= file.size
        self.bytes = total
        self._forget(file.name for file in removed if self._is_node(file))

    def _is_node(self, file: CacheFile) -> bool:
        return file.model == self._fingerprint and file.name.endswith(SUFFIX)


def _name(node: StoredNode | NodeHeader) -> str:
    digest = hashlib.blake2b(node.key.packed, digest_size=_DIGEST_BYTES).hexdigest()
    return f"{node.start}-{len(node.key)}-{digest}{SUFFIX}"


MAX_PENDING_BYTES = 512 * 2**20
COMPLAINT_INTERVAL_S = 60.0

Deliver: TypeAlias = Callable[[Sequence[StoredNode]], None]


@dataclass(frozen=True, slots=True)
class _Read:
    key: TokenKey
    known: int
    deliver: Deliver


_Job: TypeAlias = StoredNode | _Read | None
"""A node to write, a prompt to read for, or the end of the thread."""
# Requests wait for reads; the stop comes last.
_READ_RANK, _WRITE_RANK, _STOP_RANK = range(3)


class DiskTier:
    """Writes nodes in the background, and reads them for prompts; any thread may ask.

    Only plain buffers pass: MLX creates, reads and frees no array on the tier's thread.

    Attributes:
        metrics: Its numbers, as of its last change.
        is_open: Whether it still reads and writes; false once its thread has failed.
    """

    def __init__(
        self, directory: NodeDirectory, tell: Callable[[], None], *, ends_at_snapshots: bool
    ) -> None:
        """Start the thread.

        Args:
            directory: Used only by the tier from here on.
            tell: Called on the tier's thread once all queued nodes are written.
            ends_at_snapshots: Whether a prefix can be resumed only at snapshots.
        """
        self._directory = directory
        self._tell = tell
        self._ends_at_snapshots = ends_at_snapshots
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job]] = queue.PriorityQueue()
        self._numbers = count()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._dropped = 0
        self._read_tokens = 0
        self._lost: list[NodeHeader] = []
        self._failures = 0
        self._complaints = Seldom(COMPLAINT_INTERVAL_S)
        self.metrics: Values = {}
        self.is_open = True
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    def write(self, node: StoredNode) -> bool:
        """Queue a node for writing; false if the queue is full, or the tier is closed.

        A node larger than the whole queue must be the only one in it.
        """
        with self._lock:
            is_too_much = self._pending_bytes + node.segment.nbytes > MAX_PENDING_BYTES
            if not self.is_open or (is_too_much and self._pending_bytes):
                return False
            self._pending_bytes += node.segment.nbytes
        self._put(_WRITE_RANK, node)
        return True

    def count_dropped(self) -> None:
        """Count a node that is lost because it could not be written."""
        with self._lock:
            self._dropped += self.is_open

    def take_lost(self) -> list[NodeHeader]:
        """Return the nodes not written, or lost, since the last call."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def read(self, key: TokenKey, known: int, deliver: Deliver) -> bool:
        """Look for the path of a prompt; false if the tier is closed.

        Args:
            deliver: Called once, on the tier's thread, with the nodes found, possibly none.
        """
        with self._lock:
            if self.is_open:
                self._put(_READ_RANK, _Read(key, known, deliver))
            return self.is_open

    def close(self, timeout_s: float) -> None:
        """Write the queued nodes and end the thread, or abandon it after the timeout."""
        self._put(_STOP_RANK, None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("prompt cache: the disk is too slow, unwritten nodes are lost")

    def _put(self, rank: int, job: _Job) -> None:
        self._jobs.put((rank, next(self._numbers), job))

    def _run(self) -> None:
        try:
            self._work()
        except Exception:  # in any case nothing may wait for this thread any more
            log.exception("prompt cache: the disk is no longer used")
        self._close()

    def _work(self) -> None:
        self._guarded(self._directory.look_again)
        self._refresh_metrics()
        while (job := self._jobs.get()[-1]) is not None:
            self._do(job)
            with self._lock:
                self._lost += self._directory.take_lost()
            self._refresh_metrics()
            if isinstance(job, StoredNode) and self._jobs.empty():
                self._tell()

    def _close(self) -> None:
        """Accept no more jobs, and answer waiting reads with nothing found."""
        with self._lock:
            self.is_open = False
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()[-1]
                if isinstance(job, _Read):
                    job.deliver(())

    def _do(self, job: StoredNode | _Read) -> None:
        if isinstance(job, _Read):
            self._guarded(partial(self._read, job))
            return
        self._guarded(partial(self._directory.write, job))
        with self._lock:
            self._pending_bytes -= job.segment.nbytes

    def _read(self, job: _Read) -> None:
        nodes: list[StoredNode] = []
        try:
            nodes = self._directory.read(
                job.key, job.known, ends_at_snapshot=self._ends_at_snapshots
            )
            self._read_tokens += sum(len(node.key) - node.start for node in nodes)
        finally:
            job.deliver(nodes)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Run an action; the prompt cache works without the disk if it fails."""
        try:
            act()
        except OSError as error:
            self._failures += 1
            # Not every one: a full disk refuses every node.
            if self._complaints.is_due():
                problem = "prompt cache: the disk of %s failed (%d times so far): %s"
                log.warning(problem, self._directory.path, self._failures, error)

    def _refresh_metrics(self) -> None:
        numbers = {
            "bytes": self._directory.bytes,
            "files": len(self._directory),
            "read_tokens": self._read_tokens,
            "written_bytes": self._directory.written_bytes,
            "damaged": self._directory.damaged,
            "dropped": self._dropped,
        }
        self.metrics = {f"prompt_cache.disk.{name}": value for name, value in numbers.items()}
