"""The thread that reads and writes the prompt cache's files: no other thread waits for a disk."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeAlias, assert_never

from backend.cache.disk.node_directory import NodeDirectory, StoredNode
from backend.cache.disk.node_file import NodeHeader
from backend.cache.token_key import TokenKey
from backend.core.metric_table import Values
from common.log.seldom import Seldom

MAX_PENDING_BYTES = 512 * 2**20
COMPLAINT_INTERVAL_S = 60.0

Deliver: TypeAlias = Callable[[Sequence[StoredNode]], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    node: StoredNode


@dataclass(frozen=True, slots=True)
class _Read:
    key: TokenKey
    known: int
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Job: TypeAlias = _Write | _Read | _Stop


@dataclass(order=True, slots=True)
class _Queued:
    """Reads come first, because requests wait for them; the stop comes last."""

    rank: int
    number: int
    job: _Job = field(compare=False)


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
        self._jobs: queue.PriorityQueue[_Queued] = queue.PriorityQueue()
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
        self._put(1, _Write(node))
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
            key: The prompt.
            known: The number of its tokens in memory.
            deliver: Called once, on the tier's thread, with the nodes found, possibly none.
        """
        with self._lock:
            if self.is_open:
                self._put(0, _Read(key, known, deliver))
            return self.is_open

    def close(self, timeout_s: float) -> None:
        """Write the queued nodes and end the thread, or abandon it after the timeout."""
        self._put(2, _Stop())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("prompt cache: the disk is too slow, unwritten nodes are lost")

    def _put(self, rank: int, job: _Job) -> None:
        self._jobs.put(_Queued(rank, next(self._numbers), job))

    def _run(self) -> None:
        try:
            self._work()
        except Exception:  # in any case nothing may wait for this thread any more
            log.exception("prompt cache: the disk is no longer used")
        self._close()

    def _work(self) -> None:
        self._guarded(self._directory.look_again)
        self._refresh_metrics()
        while self._turn(job := self._jobs.get().job):
            self._note_lost()
            self._refresh_metrics()
            if isinstance(job, _Write) and self._jobs.empty():
                self._tell()

    def _close(self) -> None:
        """Accept no more jobs, and answer waiting reads with nothing found."""
        with self._lock:
            self.is_open = False
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait().job
                if isinstance(job, _Read):
                    job.deliver(())

    def _turn(self, job: _Job) -> bool:
        """Do one job; false ends the thread."""
        match job:
            case _Read():
                self._guarded(partial(self._read, job))
            case _Write(node):
                self._guarded(partial(self._directory.write, node))
                with self._lock:
                    self._pending_bytes -= node.segment.nbytes
            case _Stop():
                return False
            case _:
                assert_never(job)
        return True

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
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        """Log a failure, but not every one: a full disk refuses every node."""
        if self._complaints.is_due():
            log.warning(
                "prompt cache: the disk failed (%d times so far): %s", self._failures, error
            )

    def _note_lost(self) -> None:
        lost = self._directory.take_lost()
        with self._lock:
            self._lost += lost

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
