"""A call whose name is known from a header, and whose arguments fill a message as JSON."""

from backend.output.tool_calls.json_arguments import JsonArguments
from backend.output.tool_calls.wire import Outbox, WireContext, WireOutput


class JsonMessageCursor:
    """Reads the arguments from their first brace on.

    Their last brace goes out with what follows them, or with the end of the reply.
    """

    def __init__(self, context: WireContext, name: str) -> None:
        self._calls = context.calls
        self._name = name
        self._outbox = Outbox(context.opener)
        self._arguments = JsonArguments()
        self._is_open = False

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._outbox.held

    @property
    def is_mid_call(self) -> bool:
        """Whether the call is open: it is, up to what follows it."""
        return True

    def feed(self, text: str) -> WireOutput:
        """Read on."""
        self._outbox.begin()
        if not self._is_open:
            self._outbox.send(self._calls.open(self._name), 0)
            self._is_open = True
        position = 0 if self._arguments.is_whole else self._read(text)
        if self._arguments.is_malformed:
            deltas = self._outbox.end(text[:position])
            return WireOutput(deltas, rejected=self.held, rest=text[position:])
        rest = text[position:].lstrip()
        if rest:
            self._complete(len(text) - len(rest))
        return WireOutput(self._outbox.end(text), rest=rest or None)

    def finish(self, *, truncated: bool) -> WireOutput:
        """End; whole arguments make a call then, unless they were cut off from an end token."""
        if truncated:
            return WireOutput()
        if not self._arguments.is_whole:
            return WireOutput(rejected=self.held)
        self._outbox.begin()
        self._complete(0)
        return WireOutput(self._outbox.end(""))

    def _read(self, text: str) -> int:
        piece, position = self._arguments.feed(text, 0)
        if piece:
            self._outbox.send(self._calls.extend(piece), position - self._arguments.kept_back)
        return position

    def _complete(self, settled: int) -> None:
        self._outbox.send(self._calls.extend(self._arguments.missing_end), settled)
        self._calls.complete()
