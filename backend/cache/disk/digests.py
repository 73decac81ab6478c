"""Digests of things that were seen, in a file that survives a restart."""

import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = b"mlx-backend digests 1\n"
_LINE = re.compile(rb"[0-9a-f]{64}")
_LINE_BYTES = 65
# O_NONBLOCK: opening a pipe must not wait for its reader.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DigestFile:
    """Digests of 32 bytes, one in a line, the latest last; several processes may share it.

    The file begins with a mark; another file in its place is left alone. It holds up to twice as
    many digests as are kept, and is then written anew.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """Open nothing yet.

        Args:
            path: Where the file is, or will be; its directory is made when it is needed.
            limit: How many digests are kept.
        """
        self.path = path
        self._limit = limit

    def read(self) -> list[bytes]:
        """Return the latest digests, the oldest first; lines that are damaged are left out.

        Raises:
            OSError: The file cannot be read, or is another one.
        """
        try:
            with self._opened() as descriptor:
                start = max(len(_MARK), os.fstat(descriptor).st_size - self._max_bytes)
                data = os.pread(descriptor, self._max_bytes, start)
        except FileNotFoundError:
            return []
        found = [bytes.fromhex(line.decode()) for line in data.split() if _LINE.fullmatch(line)]
        return found[-self._limit :]

    def add(self, digest: bytes) -> None:
        """Append a digest.

        Raises:
            OSError: The file cannot be written, or is another one.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._opened(os.O_CREAT) as descriptor:
            os.write(descriptor, _line(digest))
            is_full = os.fstat(descriptor).st_size > self._max_bytes
        if is_full:
            self._write_anew(self.read())

    @property
    def _max_bytes(self) -> int:
        return 2 * self._limit * _LINE_BYTES

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

    def _write_anew(self, digests: Iterable[bytes]) -> None:
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            draft.touch(mode=0o600, exist_ok=False)
            draft.write_bytes(_MARK + b"".join(map(_line, digests)))
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)


def _line(digest: bytes) -> bytes:
    return digest.hex().encode() + b"\n"
