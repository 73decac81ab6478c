"""Digests of known content, in a file that survives a restart.

A file that the system refuses, or that is another file, raises `OSError`.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.directories import make_directories, replace_file

_MARK = b"mlx-backend digests 1\n"
_LINE = re.compile(rb"[0-9a-f]{64}")
_LINE_BYTES = 65
# O_NONBLOCK: opening a pipe must not block.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class DigestFile:
    """Digests of 32 bytes, one per line, the latest last; several processes may share it.

    The file starts with a mark; any other file in its place is left alone. It holds up to twice
    the limit, and is then rewritten. Its directory is created when needed.
    """

    path: Path
    limit: int

    def read(self) -> list[bytes]:
        """Return the latest digests, the oldest first; damaged lines are skipped."""
        try:
            with self._opened() as descriptor:
                start = max(len(_MARK), os.fstat(descriptor).st_size - self._max_bytes)
                data = os.pread(descriptor, self._max_bytes, start)
        except FileNotFoundError:
            return []
        found = [bytes.fromhex(line.decode()) for line in data.split() if _LINE.fullmatch(line)]
        return found[-self.limit :]

    def add(self, digest: bytes) -> None:
        """Append a digest."""
        make_directories(self.path.parent)
        with self._opened(os.O_CREAT) as descriptor:
            os.write(descriptor, _line(digest))
            is_full = os.fstat(descriptor).st_size > self._max_bytes
        if is_full:
            replace_file(self.path, _MARK + b"".join(map(_line, self.read())))

    @property
    def _max_bytes(self) -> int:
        return 2 * self.limit * _LINE_BYTES

    @contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        descriptor = os.open(self.path, _FLAGS | flags, 0o600)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(f"{self.path} is no regular file")
            if not about.st_size:
                os.write(descriptor, _MARK)
            elif os.pread(descriptor, len(_MARK), 0) != _MARK:
                raise OSError(f"{self.path} was not written by this backend")
            yield descriptor
        finally:
            os.close(descriptor)


def _line(digest: bytes) -> bytes:
    return digest.hex().encode() + b"\n"
