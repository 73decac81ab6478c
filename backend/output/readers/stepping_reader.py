"""The base of all call readers: runs steps over a growing text."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from backend.output.readers.markup import REFUTED, either, span_end
from backend.output.readers.reader import (
    NotACallError,
    Outbox,
    ReaderContext,
    ReaderOutput,
)

Step: TypeAlias = Callable[[int], int]

_SPACE = re.compile(r"\s*")


class SteppingReader(ABC):
    """Keeps unread text and runs steps over it.

    A step reads from a position of the buffer and returns the position after the text that it
    consumed, or a negative number if more text is needed.
    """

    def __init__(self, context: ReaderContext, *, opener_is_call: bool) -> None:
        """Begin after an opener.

        Args:
            context: The context in which the calls begin.
            opener_is_call: Whether the opener begins a call, so that it must be read.
        """
        self._context = context
        self._outbox = Outbox(context.opener)
        self._buffer = context.opener if opener_is_call else ""
        self._unread_opener = len(self._buffer)
        self._step: Step = self._before_call
        self._missing_end = ""
        self._keys: list[str] = []
        self._calls_begun = self._calls_ended = 0
        self._is_over = False
        self._outbox.begin(len(self._buffer))

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._outbox.held

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, or none has been completed yet."""
        return self._is_in_call or not self._calls_ended

    @property
    def _is_in_call(self) -> bool:
        return self._calls_begun > self._calls_ended

    def feed(self, text: str) -> ReaderOutput:
        """Read more text."""
        self._begin(text)
        position = 0
        try:
            while not self._is_over and (end := self._step(position)) >= 0:
                position = end
        except NotACallError as error:
            return self._reject(text, error.position)
        self._buffer = rest = self._buffer[position:]
        self._unread_opener = max(self._unread_opener - position, 0)
        deltas = self._outbox.end(text)
        return ReaderOutput(deltas, rest=rest if self._is_over else None)

    @abstractmethod
    def _before_call(self, position: int) -> int:
        """Find the beginning of a call, or the end of all calls."""

    def _begin(self, text: str) -> None:
        self._outbox.begin(len(self._buffer))
        self._buffer += text

    def _reject(self, text: str, position: int) -> ReaderOutput:
        """Return text that is not a call, or that follows the last one."""
        deltas = self._outbox.end(text)
        if not self._calls_begun:
            position = max(position, self._unread_opener)
        raw, rest = self.held, self._buffer[position:]
        raw = raw[: len(raw) - len(rest)]
        if self.is_mid_call:
            return ReaderOutput(deltas, rejected=raw, rest=rest, is_damaged=True)
        return ReaderOutput(deltas, rest=raw + rest, is_damaged=True)

    def _begin_call(self, name: str, end: int) -> None:
        """Emit the beginning of a call that is certain from the text up to `end`."""
        self._calls_begun += 1
        self._missing_end = "{}"
        self._keys = []
        self._outbox.send(self._context.calls.open(name), end)

    def _begin_argument(self, key: str, end: int) -> None:
        """Emit a key as JSON."""
        self._keys.append(key)
        self._send(f"{{{key}: " if self._missing_end == "{}" else f", {key}: ", end)
        self._missing_end = "}"

    def _lacks_arguments(self, unsent_name: str) -> bool:
        """Tell whether required arguments are missing from a call that nothing has closed.

        Args:
            unsent_name: The name of a call that has not been emitted, which has no arguments yet.
        """
        calls = self._context.calls
        name = unsent_name or calls.open_name
        keys = [] if unsent_name else self._keys
        return calls.lacks_arguments(name, f"{{{', '.join(f'{key}: 0' for key in keys)}}}")

    def _end_call(self, end: int) -> None:
        """Emit the end, which was held back so that an open call never looks complete."""
        self._send(self._missing_end, end)
        self._context.calls.complete()
        self._calls_ended += 1
        self._step = self._before_call

    def _send(self, piece: str, end: int) -> None:
        if piece:
            self._outbox.send(self._context.calls.extend(piece), end)

    def _skip_space(self, position: int) -> int:
        return span_end(_SPACE, self._buffer, position)

    def _expected(self, position: int, *ends: int) -> int:
        """Return the end of the text that must be at a position."""
        end = either(*ends)
        if end == REFUTED:
            raise NotACallError(position)
        return end
