"""A directory in which processes of one user tell each other something, without a server.

Each process has a file there, locked as long as it lives: the kernel gives the lock back however
it ends, and a file whose lock is free is a dead one's, which the next reader removes. The lock of
the directory itself makes a look and what is written because of it one act.
"""

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_FILE_BYTES = 64 * 1024

_NAME = re.compile(r"[0-9]+-[0-9a-f]{16}\.entry")
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for its writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_POLL_INTERVAL_S = 0.002


class ForeignDirectoryError(OSError):
    """The directory belongs to somebody else, or lets others in."""


class LockedDirectory:
    """The directory, and the file of this process in it; for one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Make the directory, unless it is there.

        Args:
            path: Its parent must exist.

        Raises:
            ForeignDirectoryError: It is not this user's alone.
            OSError: It is no directory, or a link, or cannot be made.
        """
        self._path = path
        self._name = f"{os.getpid()}-{secrets.token_hex(8)}.entry"
        self._file: int | None = None
        self._data = b""
        self._directory = _opened(path)

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Keep the others from reading and writing; what somebody removed is made again.

        Args:
            timeout_s: How long to wait for the others, of which one may have been stopped.

        Raises:
            TimeoutError: One of them did not leave in time.
            OSError: The directory has gone and cannot be made again.
        """
        if not _is_there(self._directory, self._path):
            directory = _opened(self._path)
            os.close(self._directory)
            self._directory = directory
        with _locked(self._directory, timeout_s):
            if self._file is None or not _is_there(self._file, self._name, self._directory):
                self._replace_file()
            yield

    def write(self, data: bytes) -> None:
        """Replace what the file of this process holds; inside `exclusive`.

        Raises:
            OSError: The file system is full.
        """
        if data != self._data and self._file is not None:
            self._data = b""
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, data, 0)
            self._data = data

    def others(self) -> Mapping[str, bytes]:
        """Return what the files of other live processes hold, by name; inside `exclusive`.

        Files of the dead are removed. What is no regular file of this user's is left alone.
        """
        with os.scandir(self._directory) as entries:
            names = [each.name for each in entries if _NAME.fullmatch(each.name)]
        found = {name: self._read(name) for name in sorted(names) if name != self._name}
        return {name: data for name, data in found.items() if data is not None}

    def close(self) -> None:
        """Take the file of this process away."""
        if self._file is not None:
            with suppress(OSError):
                os.unlink(self._name, dir_fd=self._directory)
            os.close(self._file)
        os.close(self._directory)

    def _replace_file(self) -> None:
        """Make the file of this process; nobody reads meanwhile, who would take it for a dead's."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._data = None, b""
        file = os.open(self._name, _CREATE, 0o600, dir_fd=self._directory)
        fcntl.flock(file, fcntl.LOCK_EX)
        self._file = file

    def _read(self, name: str) -> bytes | None:
        try:
            file = os.open(name, _READ, dir_fd=self._directory)
        except OSError:
            return None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            if _is_free(file):
                os.unlink(name, dir_fd=self._directory)
                return None
            return os.read(file, MAX_FILE_BYTES)
        finally:
            os.close(file)


def _opened(path: Path) -> int:
    """Open the directory, made if it is not there."""
    with suppress(FileExistsError):
        path.mkdir(mode=stat.S_IRWXU)
    directory = os.open(path, _OPEN_DIRECTORY)
    try:
        _require_private(path, os.fstat(directory))
    except BaseException:
        os.close(directory)
        raise
    return directory


def _is_there(descriptor: int, path: str | Path, inside: int | None = None) -> bool:
    """Tell whether an open file still has its name: cleaners of temporary files take it."""
    try:
        status = os.stat(path, dir_fd=inside, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _require_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ForeignDirectoryError(f"{path} belongs to another user")
    if status.st_mode & _OTHERS:
        raise ForeignDirectoryError(f"{path} lets other users in: chmod 700 makes it private")


def _is_free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(directory: int, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError("another process does not leave the directory") from None
            time.sleep(_POLL_INTERVAL_S)
    try:
        yield
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)
