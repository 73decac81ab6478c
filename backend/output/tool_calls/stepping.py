"""Read calls from a growing text, step by step: what cursors over raw text have in common."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from backend.output.tool_calls.markup import REFUTED, either, span_end
from backend.output.tool_calls.wire import NotACallError, Outbox, WireContext, WireOutput

Step: TypeAlias = Callable[[int], int]

_SPACE = re.compile(r"\s*")


class SteppingCursor(ABC):
    """Keeps the text that is not understood yet, and runs steps over it.

    A step reads from a position of the buffer and returns the position behind what it
    understood, or a negative number while more text must tell.
    """

    def __init__(self, context: WireContext, *, opener_is_call: bool) -> None:
        """Begin behind an opener.

        Args:
            context: Where the wire begins.
            opener_is_call: Whether the opener is the beginning of a call, and so to be read.
        """
        self._context = context
        self._outbox = Outbox(context.opener)
        self._buffer = context.opener if opener_is_call else ""
        self._fed_before = len(self._buffer)
        self._unread_opener = len(self._buffer)
        self._step: Step = self._before_call
        self._missing_end = ""
        self._calls_begun = 0
        self._calls_ended = 0
        self._is_over = False

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._outbox.held

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, or none was complete yet."""
        return self._calls_begun > self._calls_ended or not self._calls_ended

    def feed(self, text: str) -> WireOutput:
        """Read on."""
        self._begin(text)
        position = 0
        try:
            while not self._is_over and (end := self._step(position)) >= 0:
                position = end
        except NotACallError as error:
            return self._reject(text, error.position)
        self._buffer = rest = self._buffer[position:]
        deltas = self._outbox.end(text)
        return WireOutput(deltas, rest=rest if self._is_over else None)

    @abstractmethod
    def _before_call(self, position: int) -> int:
        """Find the beginning of a call, or the end of the wire."""

    def _begin(self, text: str) -> None:
        self._fed_before = len(self._buffer)
        self._buffer += text
        self._outbox.begin()

    def _reject(self, text: str, position: int) -> WireOutput:
        """End with what is no call, or with what just follows the last one."""
        deltas = self._outbox.end(text)
        if not self._calls_begun:
            position = max(position, self._unread_opener)
        raw, rest = self.held, self._buffer[position:]
        raw = raw[: len(raw) - len(rest)]
        if self.is_mid_call:
            return WireOutput(deltas, rejected=raw, rest=rest)
        return WireOutput(deltas, rest=raw + rest)

    def _begin_call(self, name: str, end: int) -> None:
        """Hand out the beginning of a call that was told by the text up to `end`."""
        self._calls_begun += 1
        self._missing_end = "{}"
        self._outbox.send(self._context.calls.open(name), end - self._fed_before)

    def _begin_argument(self, key: str, end: int) -> None:
        """Hand out a key, as JSON."""
        self._send(f"{{{key}: " if self._missing_end == "{}" else f", {key}: ", end)
        self._missing_end = "}"

    def _end_call(self, end: int) -> None:
        """Hand out what was kept back so that an open call never looks complete."""
        self._send(self._missing_end, end)
        self._context.calls.complete()
        self._calls_ended += 1
        self._step = self._before_call

    def _send(self, piece: str, end: int) -> None:
        if piece:
            self._outbox.send(self._context.calls.extend(piece), end - self._fed_before)

    def _skip_space(self, position: int) -> int:
        return span_end(_SPACE, self._buffer, position)

    def _expected(self, position: int, *ends: int) -> int:
        """Return the end of what must stand at a position."""
        end = either(*ends)
        if end == REFUTED:
            raise NotACallError(position)
        return end
