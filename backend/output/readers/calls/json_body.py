"""Reads a call named in a header, whose arguments fill a message as JSON."""

import re

from backend.output.readers.markup import UNDECIDED, span_end
from backend.output.readers.reader import NotACallError, ReaderContext, ReaderOutput
from backend.output.readers.stepping_reader import SteppingReader
from backend.output.readers.values.json_arguments import JsonArguments
from backend.output.readers.values.tolerant_json import NotJsonError, read_json

_SUPERFLUOUS = re.compile(r"[\s\]}]*")


class JsonBodyReader(SteppingReader):
    """Reads the arguments from their first brace on.

    Their last brace is emitted with the text after it, or at the end of the reply.
    """

    def __init__(self, context: ReaderContext, name: str, ends: tuple[str, ...] = ()) -> None:
        """Begin a body.

        Args:
            context: The context in which it begins.
            name: Name of the tool.
            ends: Texts that end a message: damaged arguments are collected up to them.
        """
        super().__init__(context, opener_is_call=False)
        self._ends = ends
        self._body = ""
        self._name = name
        self._arguments = JsonArguments(ends)

    @property
    def is_mid_call(self) -> bool:
        """Whether the call is open, which it is until some text follows it."""
        return True

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; complete arguments then make a call, unless cut off from an end token."""
        if truncated:
            return ReaderOutput()
        self._begin("")
        body = self._body + self._buffer
        if not self._arguments.is_whole and self._repair(body, is_last=True):
            return ReaderOutput(self._outbox.end(""))
        if not self._arguments.is_whole:
            # What is held of a call that was begun is a piece of its arguments.
            held = "" if self._calls_begun else self.held
            return ReaderOutput(self._outbox.end(""), rejected=held)
        self._complete(0)
        return ReaderOutput(self._outbox.end(""))

    def _before_call(self, position: int) -> int:
        self._step = self._in_arguments
        return position

    def _in_arguments(self, position: int) -> int:
        if position == len(self._buffer):
            return UNDECIDED
        piece, end = self._arguments.feed(self._buffer, position)
        self._body += self._buffer[position:end]
        self._hand_out(piece, end - self._arguments.kept_back)
        if self._arguments.is_malformed:
            self._step = self._in_damage
            return end
        if self._arguments.is_whole:
            self._step = self._after_arguments
        return end

    def _in_damage(self, position: int) -> int:
        """Collect a body that is not JSON, to read it again."""
        text = self._buffer[position:]
        found = [place for end in self._ends if (place := text.find(end)) >= 0]
        if not found:
            # The text may end with the beginning of an end.
            settled = max(len(text) - max(map(len, self._ends), default=0), 0)
            self._body += text[:settled]
            return position + settled if settled else UNDECIDED
        self._body += text[: min(found)]
        if not self._repair(self._body):
            raise NotACallError(position)
        self._is_over = True
        return position + min(found)

    def _repair(self, body: str, *, is_last: bool = False) -> bool:
        """Emit the arguments found in a damaged body, if any."""
        for end in self._ends:
            body = body.rstrip().removesuffix(end)
        try:
            found = read_json(body, 0)
        except NotJsonError:
            return False
        calls = self._context.calls
        if not found.text.startswith("{"):
            return False
        if is_last and found.is_open and calls.lacks_arguments(self._name, found.text):
            return False
        if not self._calls_begun:
            self._begin_call(self._name, 0)
        delta = calls.settle(found.text)
        if delta is None:
            return False
        self._outbox.send(delta, 0)
        calls.complete(*found.reasons)
        self._calls_ended += 1
        return True

    def _after_arguments(self, position: int) -> int:
        """Skip whitespace and superfluous brackets."""
        end = span_end(_SUPERFLUOUS, self._buffer, position)
        if end < len(self._buffer):
            self._complete(end)
            self._is_over = True
            return end
        return end if end > position else UNDECIDED

    def _hand_out(self, piece: str, end: int) -> None:
        """Emit a piece of the arguments; the first piece begins the call."""
        if piece and not self._calls_begun:
            self._begin_call(self._name, end)
        self._send(piece, end)

    def _complete(self, end: int) -> None:
        if not self._calls_begun:
            self._begin_call(self._name, end)
        self._missing_end = self._arguments.missing_end
        self._end_call(end)
