"""Directories of one user, the same for all processes of that user on a machine."""

import atexit
import errno
import fcntl
import logging
import os
import pwd
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "mlx-grpc-backend"

log = logging.getLogger(__name__)


def state_directory(
    environment: Mapping[str, str], platform: str = sys.platform, home: Path | None = None
) -> Path:
    """Return the directory for files that outlive this user's backends; not created.

    Never a temporary or a runtime directory: hosts give each process its own, and remove it.

    Args:
        environment: May move it, by `XDG_STATE_HOME`.
        platform: As in `sys.platform`.
        home: The user's, as recorded by the system unless given: services lack `HOME`.
    """
    moved = Path(environment.get("XDG_STATE_HOME", ""))
    if moved.is_absolute():
        return moved / NAME
    home = home or _home(environment)
    if platform == "darwin":
        return home / "Library" / "Application Support" / NAME
    return home / ".local" / "state" / NAME


def _home(environment: Mapping[str, str]) -> Path:
    given = Path(environment.get("HOME", ""))
    if given.is_absolute():
        return given
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a container may run as a user without an entry
        return Path("/")


MAX_FILE_BYTES = 64 * 1024

_NAME = re.compile(r"[0-9]+-[0-9a-f]{16}\.entry")
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for its writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_POLL_INTERVAL_S = 0.002


class ForeignDirectoryError(OSError):
    """The directory belongs to another user, or is open to others."""


class LockedDirectory:
    """The directory, and this process's file in it; for one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Create the directory if it is missing.

        Args:
            path: Missing parents are created too.

        Raises:
            ForeignDirectoryError: Other users own it or have access.
            OSError: It is not a directory, is a link, or cannot be created.
        """
        self._path = path
        self._name = f"{os.getpid()}-{secrets.token_hex(8)}.entry"
        self.file: int | None = None
        self._data = b""
        self.directory = _opened(path)

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Keep other processes from reading and writing; recreates a removed directory.

        Args:
            timeout_s: How long to wait for the others, one of which may be suspended.

        Raises:
            TimeoutError: Another process did not leave in time.
            OSError: The directory is gone and cannot be recreated.
        """
        if not _is_there(self.directory, self._path):
            directory = _opened(self._path)
            os.close(self.directory)
            self.directory = directory
        with _locked(self.directory, timeout_s):
            if self.file is None or not _is_there(self.file, self._name, self.directory):
                self._replace_file()
            yield

    def write(self, data: bytes) -> None:
        """Replace the content of this process's file; call it inside `exclusive`.

        Raises:
            OSError: The file system is full.
        """
        if data != self._data and self.file is not None:
            self._data = b""
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, data, 0)
            self._data = data

    def others(self) -> Mapping[str, bytes]:
        """Return the content of other live processes' files by name; call it inside `exclusive`.

        Removes the files of dead processes. Ignores all but this user's regular files.
        """
        with os.scandir(self.directory) as entries:
            names = [each.name for each in entries if _NAME.fullmatch(each.name)]
        found = {name: self._read(name) for name in sorted(names) if name != self._name}
        return {name: data for name, data in found.items() if data is not None}

    def close(self) -> None:
        """Remove this process's file."""
        if self.file is not None:
            with suppress(OSError):
                os.unlink(self._name, dir_fd=self.directory)
            os.close(self.file)
        os.close(self.directory)

    def _replace_file(self) -> None:
        """Create this process's file; no reader can mistake it for a dead one meanwhile."""
        if self.file is not None:
            os.close(self.file)
        self.file, self._data = None, b""
        file = os.open(self._name, _CREATE, 0o600, dir_fd=self.directory)
        fcntl.flock(file, fcntl.LOCK_EX)
        self.file = file

    def _read(self, name: str) -> bytes | None:
        try:
            file = os.open(name, _READ, dir_fd=self.directory)
        except OSError:
            return None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            if _is_free(file):
                os.unlink(name, dir_fd=self.directory)
                return None
            return os.read(file, MAX_FILE_BYTES)
        finally:
            os.close(file)


KERNELS_BYTES = 16 * 2**20
"""Room that MLX and its compiler need for kernels, many times over."""


def temporary_directory(state: Path, room_bytes: int = KERNELS_BYTES) -> Path:
    """Return a directory for temporary files that no other user can write to or replace.

    MLX compiles kernels into the temporary directory, and runs those that it finds there: under a
    umask of 0, or in a directory of everybody's, another user could exchange them.

    Args:
        state: The result of `state_directory`; kernels kept there serve later loads.
        room_bytes: The bytes that must be free there.

    Returns:
        A directory below it. If that is impossible, a new one, removed when this process exits.

    Raises:
        OSError: There is no place to write to.
    """
    kept = state / "tmp"
    try:
        make_private(kept)
        if not os.access(kept, os.W_OK):
            problem: object = f"{kept} cannot be written to"
        elif shutil.disk_usage(kept).free < room_bytes:
            problem = f"{kept} has less than {room_bytes:,} bytes free"
        else:
            return kept
    except OSError as error:
        problem = error
    own = Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    log.info("compiled kernels are not kept for later loads: %s", problem)
    return own


def make_private(path: Path) -> None:
    """Have a directory that no other user can write to or replace; missing parents are created.

    Raises:
        OSError: Others can, or it cannot be created.
    """
    _require_safe_parents(path)
    os.close(_opened(path))


def _require_safe_parents(path: Path) -> None:
    """Raise OSError if everybody may exchange a directory on the way; missing ones are fine."""
    for parent in path.parents:
        with suppress(FileNotFoundError):
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise ForeignDirectoryError(f"{parent} can be written to by all users")


def make_directories(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents, unless it is there.

    Raises:
        NotADirectoryError: Something else is there, of which the system says that it exists.
        OSError: It cannot be created.
    """
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _create(path: Path) -> None:
    """Create a directory and its missing parents, each of them only this user's."""
    if not path.parent.exists():
        _create(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=stat.S_IRWXU)


def _opened(path: Path) -> int:
    """Open the directory, creating it if it is missing."""
    _create(path)
    if path.is_symlink():
        raise ForeignDirectoryError(f"{path} is a link")
    directory = os.open(path, _OPEN_DIRECTORY)
    try:
        _require_private(path, os.fstat(directory))
    except BaseException:
        os.close(directory)
        raise
    return directory


def _is_there(descriptor: int, path: str | Path, inside: int | None = None) -> bool:
    """Tell whether an open file still has its name: cleaners of temporary files remove it."""
    try:
        status = os.stat(path, dir_fd=inside, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def others_may_write(status: os.stat_result) -> bool:
    """Tell whether a file or directory is another user's, or others can write to it."""
    return status.st_uid != os.geteuid() or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def own_content(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file that only this user can write.

    Raises:
        OSError: It cannot be read.
        ValueError: It is something else, or larger than the limit.
    """
    with open(path, "rb", opener=lambda name, _flags: os.open(name, _READ)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit_bytes:
            raise ValueError(f"it is no regular file of at most {limit_bytes:,} bytes")
        if others_may_write(status):
            raise ValueError("others may have written it")
        return file.read(limit_bytes)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file at once, so that no reader sees a part of it."""
    make_directories(path.parent, stat.S_IRWXU)
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(part).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(part).unlink()
        raise


def _require_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ForeignDirectoryError(f"{path} belongs to another user")
    if status.st_mode & stat.S_ISVTX and status.st_mode & _OTHERS:
        raise ForeignDirectoryError(f"{path} is a directory of all users: name one inside it")
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
                raise TimeoutError("another process holds the lock of the directory") from None
            time.sleep(_POLL_INTERVAL_S)
    try:
        yield
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)
