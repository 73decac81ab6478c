"""Keeps what trials found of models: in memory for the next process, in a file for the next start.

The file is never needed: without it, or with one that cannot be read, trials run again.
"""

import contextlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from backend.engine.findings import Findings, decoded, encoded

MAX_MODELS = 256
MAX_FILE_BYTES = 2**20

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger(__name__)


class FindingsStore:
    """The findings of models by their keys; for any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """Start empty; the file is read when it is needed.

        Args:
            path: The file; `None` keeps them in memory only.
        """
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, Findings] = {}
        self._has_read = False
        self._is_writable = path is not None

    def known(self) -> Mapping[str, Findings]:
        """Return all findings; reads the file the first time."""
        with self._lock:
            if not self._has_read:
                self._has_read = True
                self._known = {**self._read(logging.WARNING), **self._known}
            return dict(self._known)

    def note(self, key: str, findings: Findings) -> None:
        """Keep the findings of a model in memory."""
        with self._lock:
            self._known.pop(key, None)
            self._known[key] = findings

    def forgive(self) -> None:
        """Let trials that ended processes be tried again: somebody has asked for a load."""
        with self._lock:
            self._known = {
                key: msgspec.structs.replace(each, begun=0) for key, each in self._known.items()
            }

    def write(self) -> None:
        """Write the file, with what other servers wrote to it; an error is only logged.

        What a process has begun to try, and may have ended it, is not written.
        """
        with self._lock:
            if self._path is None or not self._is_writable:
                return
            settled = {key: each for key, each in self._known.items() if not each.begun}
            others = [each for each in self._read(logging.DEBUG).items() if each[0] not in settled]
            latest = [*others, *settled.items()][-MAX_MODELS:]
            try:
                _replace(self._path, encoded(latest))
            except OSError as error:
                self._is_writable = False
                log.warning("what loads found of models is not kept: %s", error)

    def _read(self, level: int) -> Mapping[str, Findings]:
        """Return what the file has; nothing if it is missing, foreign or malformed."""
        if self._path is None:
            return {}
        try:
            return decoded(_own_content(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.log(level, "%s is not used, and models are tried again: %s", self._path, error)
            return {}


def _own_content(path: Path) -> bytes:
    """Return the content of a regular file that only this user can write.

    Raises:
        OSError: It cannot be read.
        ValueError: It is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ValueError("it is no regular file of at most a megabyte")
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise ValueError("others may have written it")
        return file.read(MAX_FILE_BYTES)


def _replace(path: Path, content: bytes) -> None:
    """Write a file at once, so that no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(part).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(part).unlink()
        raise
