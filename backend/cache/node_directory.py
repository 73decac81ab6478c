"""The nodes of one model in a directory: found by prefix, bounded in bytes, shared with others.

Several processes may use a directory: files appear as a whole, a file that has gone is a miss,
and what somebody else has written is found at the next look.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.cache.node_file import (
    DRAFT_SUFFIX,
    SUFFIX,
    DamagedFileError,
    NodeHeader,
    read_header,
    read_node,
    write_node,
)
from backend.cache.plain import PlainSegment
from backend.cache.radix import RadixTree
from backend.cache.token_key import TokenKey

_DIGEST_BYTES = 16
_DAMAGED_SUFFIX = ".damaged"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node as it is written and read.

    Attributes:
        key: The tokens from the root to the node's end.
        start: Where the node begins.
    """

    key: TokenKey
    start: int
    segment: PlainSegment


@dataclass(frozen=True, slots=True)
class _FileSpan:
    """Consecutive tokens of a file; `ends_file` if the last of them is the file's last."""

    path: Path
    ends_file: bool = True

    def split(self, at: int) -> "tuple[_FileSpan, _FileSpan]":  # noqa: ARG002 (any place will do)
        return _FileSpan(self.path, ends_file=False), self

    def joined(self, other: "_FileSpan") -> None:  # noqa: ARG002 (never)
        return None


class NodeDirectory:
    """The files of one model below a directory of many; belongs to one thread.

    Attributes:
        bytes: What the files of all models took at the last look.
        damaged: How many files were put into quarantine.
    """

    def __init__(self, root: Path, fingerprint: str, budget_bytes: int) -> None:
        """Make the directory.

        Args:
            root: Shared by all models.
            fingerprint: Names the model whose nodes these are.
            budget_bytes: What all files of all models may take.

        Raises:
            OSError: It cannot be made.
        """
        self._root = root
        self._own = root / fingerprint
        self._fingerprint = fingerprint
        self._budget_bytes = budget_bytes
        self._headers: dict[Path, NodeHeader] = {}
        self._index: RadixTree[_FileSpan] = RadixTree()
        self._orphans: set[Path] = set()
        self.bytes = 0
        self.damaged = 0
        self._own.mkdir(parents=True, exist_ok=True)

    def look_again(self) -> None:
        """Take in what has appeared, and forget what has gone."""
        self.bytes = sum(size for _, size, _ in self._files())
        there = set(self._own.glob(f"*{SUFFIX}"))
        gone = self._headers.keys() - there
        new = there - self._headers.keys()
        for path in gone:
            del self._headers[path]
        for path in new:
            self._read_header(path)
        if gone:
            self._reindex()
        elif new:
            self._index_files(new)

    def write(self, node: StoredNode) -> None:
        """Write a node, unless it is there; the oldest files make room.

        Raises:
            OSError: The disk refuses.
        """
        path = self._path(node)
        known = self._headers.get(path)
        if known is not None and known.has_snapshot >= node.segment.has_snapshot:
            return
        self._make_room(node.segment.nbytes)
        # Somebody may have removed it since.
        self._own.mkdir(parents=True, exist_ok=True)
        write_node(path, self._fingerprint, node.key, node.start, node.segment)
        self._headers[path] = NodeHeader(node.key, node.start, node.segment.has_snapshot)
        self._index_files([path])
        self._touch(node.key)

    def read(self, key: TokenKey, known: int, *, ends_at_snapshot: bool) -> list[StoredNode]:
        """Return the nodes on the path of a prompt that reach beyond what is known of it.

        Args:
            key: The prompt.
            known: How many of its tokens need not be read.
            ends_at_snapshot: Whether nothing is of use behind the last snapshot.
        """
        self.look_again()
        paths = self._paths(key, known, ends_at_snapshot=ends_at_snapshot)
        nodes: list[StoredNode] = []
        for path in paths:
            node = self._read(path)
            if node is None:
                break
            nodes.append(node)
        self._touch(key)
        return nodes

    def __len__(self) -> int:
        """Return the number of this model's files."""
        return len(self._headers)

    def _paths(self, key: TokenKey, known: int, *, ends_at_snapshot: bool) -> Sequence[Path]:
        found = self._index.match(key)
        spans = [(node.value, node.end) for node in found.nodes]
        if ends_at_snapshot:
            while spans and not self._is_snapshot(
                *spans[-1], limit=min(len(key) - 1, found.length)
            ):
                spans.pop()
        wanted = (span.path for span, end in spans if end > known)
        return list(dict.fromkeys(wanted))

    def _is_snapshot(self, span: _FileSpan, end: int, *, limit: int) -> bool:
        return span.ends_file and end <= limit and self._headers[span.path].has_snapshot

    def _read(self, path: Path) -> StoredNode | None:
        try:
            header, segment = read_node(path, self._fingerprint)
        except DamagedFileError as error:
            self._quarantine(path, error)
        except OSError as error:
            log.info("prompt cache: %s cannot be read: %s", path.name, error)
            self._forget([path])
        else:
            return StoredNode(header.key, header.start, segment)
        return None

    def _read_header(self, path: Path) -> None:
        try:
            self._headers[path] = read_header(path, self._fingerprint)
        except DamagedFileError as error:
            self._quarantine(path, error)
        except OSError as error:
            log.info("prompt cache: %s cannot be read: %s", path.name, error)

    def _quarantine(self, path: Path, error: DamagedFileError) -> None:
        log.warning("prompt cache: %s is damaged and put aside: %s", path.name, error)
        self.damaged += 1
        try:
            path.replace(path.with_suffix(_DAMAGED_SUFFIX))
        except OSError as problem:
            log.info("prompt cache: %s cannot be put aside: %s", path.name, problem)
        self._forget([path])

    def _forget(self, paths: Iterable[Path]) -> None:
        known = [path for path in paths if self._headers.pop(path, None)]
        if known:
            self._reindex()

    def _reindex(self) -> None:
        self._index = RadixTree()
        self._index_files(self._headers)

    def _index_files(self, paths: Iterable[Path]) -> None:
        """Add files to the index, parents first; one whose parent is missing waits for it."""
        waiting = self._orphans.union(paths) & self._headers.keys()
        self._orphans = set()
        for path in sorted(waiting, key=lambda path: self._headers[path].start):
            header = self._headers[path]
            length = self._index.match(header.key).length
            if length < header.start:
                self._orphans.add(path)
            elif length < len(header.key):
                self._index.insert(header.key, length, _FileSpan(path))

    def _touch(self, key: TokenKey) -> None:
        """Make the files of a path the latest, those nearer to the root later still."""
        for node in reversed(self._index.match(key).nodes):
            try:
                os.utime(node.value.path)
            except OSError:
                continue

    def _make_room(self, needed: int) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files) + needed
        removed = []
        for _, size, path in files:
            if total <= self._budget_bytes:
                break
            path.unlink(missing_ok=True)
            removed.append(path)
            total -= size
        self.bytes = total
        self._forget(removed)

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return time, size and path of every file of every model.

        Also of those in quarantine, and of drafts: who is killed while it writes leaves one behind.
        """
        files = []
        for path in self._root.glob("*/*"):
            try:
                status = path.stat()
            except OSError:
                continue
            if path.suffix in (SUFFIX, DRAFT_SUFFIX, _DAMAGED_SUFFIX):
                files.append((status.st_mtime_ns, status.st_size, path))
        return files

    def _path(self, node: StoredNode) -> Path:
        digest = hashlib.blake2b(node.key.packed, digest_size=_DIGEST_BYTES).hexdigest()
        return self._own / f"{node.start}-{len(node.key)}-{digest}{SUFFIX}"
