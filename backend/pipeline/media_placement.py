"""Finds the message that each medium belongs to.

Hosts send the media of all messages in one list, without their positions. New media belong to
the last question; those of earlier questions stay with them, so that the prompt keeps its
prefix.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from backend.cache.digests import DigestFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from backend.core.prompt import MediaKind, Message

MAX_QUESTIONS = 16_384
MAX_GUESSES = 256
FILE_NAME = "mlx-backend-media-places"

log = logging.getLogger(__name__)

Queues: TypeAlias = "Mapping[MediaKind, Sequence[bytes]]"
"""Digests of media by kind, each in order."""

Counts: TypeAlias = "Mapping[MediaKind, int]"


class PlacementMemory:
    """Remembers the media of each question, keyed by the conversation up to it; thread-safe.

    Where that is unknown, as after a client has dropped old turns or an answer was edited, the
    question itself and its own media count. It stores digests, also in a file if it has a
    directory.
    """

    def __init__(self, directory: str | None = None) -> None:
        """Open no file yet; without a directory there is none."""
        self._lock = threading.Lock()
        self._questions: OrderedDict[bytes, None] = OrderedDict()
        path = Path(directory).expanduser() / FILE_NAME if directory else None
        self._file = DigestFile(path, MAX_QUESTIONS) if path else None
        self._is_read = False

    def place(self, messages: Sequence[Message], media: Queues) -> Sequence[Counts]:
        """Assign media to messages, remember and return the counts; may read a file.

        Every medium goes to a message, in order; the rest goes to the last question.
        """
        self._read_once()
        questions = [n for n, message in enumerate(messages) if message.role == "user"]
        latest = questions[-1] if questions else len(messages) - 1
        placed: list[Counts] = [{} for _ in messages]
        used: Counts = dict.fromkeys(media, 0)
        said = hashlib.sha256()
        for index, message in enumerate(messages):
            # System prompts often tell the time.
            if message.role != "system":
                said.update(repr((message.role, message.content)).encode(errors="replace"))
            if index == latest:
                counts: Counts = {kind: len(media[kind]) - used[kind] for kind in media}
            elif index in questions:
                counts = self._known_counts(said.digest(), message, media, used)
            else:
                continue
            placed[index] = counts
            if index in questions:
                self._remember(_name(said.digest(), media, _total(used, counts)))
                if any(counts.values()):
                    self._remember(_own_name(message, media, used, counts))
            used = _total(used, counts)
        return placed

    def _known_counts(self, said: bytes, message: Message, media: Queues, used: Counts) -> Counts:
        """Return the media counts that a question had when it was the last one, if known."""
        for counts in _guesses(media, used):
            if self._knows(_name(said, media, _total(used, counts))):
                return counts
        for counts in _guesses(media, used):
            if any(counts.values()) and self._knows(_own_name(message, media, used, counts)):
                return counts
        return {}

    def _knows(self, name: bytes) -> bool:
        with self._lock:
            return name in self._questions

    def _read_once(self) -> None:
        with self._lock:
            if self._file is None or self._is_read:
                return
            self._is_read = True
            try:
                self._questions = OrderedDict.fromkeys(self._file.read())
            except OSError as error:
                self._give_file_up(error)

    def _remember(self, name: bytes) -> None:
        with self._lock:
            is_new = name not in self._questions
            self._questions[name] = None
            self._questions.move_to_end(name)
            if len(self._questions) > MAX_QUESTIONS:
                self._questions.popitem(last=False)
            if self._file is not None and is_new:
                try:
                    self._file.add(name)
                except OSError as error:
                    self._give_file_up(error)

    def _give_file_up(self, error: OSError) -> None:
        log.warning("media placements will not survive a restart: %s", error)
        self._file = None


def _guesses(media: Queues, used: Counts) -> Iterator[Counts]:
    """Yield the possible counts of the next media by kind, largest first."""
    ranges = [range(len(media[kind]) - used[kind], -1, -1) for kind in media]
    for counts in itertools.islice(itertools.product(*ranges), MAX_GUESSES):
        yield dict(zip(media, counts, strict=True))


def _total(used: Counts, counts: Counts) -> Counts:
    return {kind: count + counts.get(kind, 0) for kind, count in used.items()}


def _own_name(message: Message, media: Queues, used: Counts, counts: Counts) -> bytes:
    """Return a digest of a question and its own media, which is none of a conversation."""
    total = _total(used, counts)
    own = {kind: queue[used[kind] : total[kind]] for kind, queue in media.items()}
    said = hashlib.sha256(f"alone {message.content!r}".encode(errors="replace"))
    return _name(said.digest(), own, counts)


def _name(said: bytes, media: Queues, used: Counts) -> bytes:
    """Return a digest of texts, given by their own digest, and of so many media."""
    digest = hashlib.sha256(said)
    for kind, queue in media.items():
        digest.update(f"{kind.value} {used[kind]}".encode())
        for medium in queue[: used[kind]]:
            digest.update(medium)
    return digest.digest()
