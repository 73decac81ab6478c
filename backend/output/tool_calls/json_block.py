"""Calls as JSON objects between two markers, `<tool_call>{"name": …}</tool_call>`.

The wire of Hermes and Qwen. Several objects in one block are taken for calls as well, be they
a list or one behind the other, and so are braces doubled as in a template.
"""

from collections.abc import Callable
from typing import TypeAlias

from backend.output.tool_calls.json_call import JsonCallReader
from backend.output.tool_calls.wire import NotACallError, Outbox, WireContext, WireOutput

_Step: TypeAlias = Callable[[str, int], int]


class JsonBlockCursor:
    """Reads one block, at whose end stands `closer`.

    Where the end is, JSON tells: markers inside strings are text. Inside a thought, where a
    model may quote its instructions, only a block whose first key is an offered name counts.
    """

    def __init__(self, context: WireContext, *, closer: str) -> None:
        self._context = context
        self._closer = closer
        self._closer_chars = 0
        self._outbox = Outbox(context.opener)
        self._calls_in_block = 0
        self._call = self._new_call()
        self._step: _Step = self._between_calls
        self._is_over = False

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._outbox.held

    @property
    def is_mid_call(self) -> bool:
        """Whether an object is open, or none was complete yet."""
        return self._step == self._in_call or not self._calls_in_block

    def feed(self, text: str) -> WireOutput:
        """Read on."""
        position = 0
        self._outbox.begin()
        try:
            while position < len(text) and not self._is_over:
                position = self._step(text, position)
        except NotACallError as error:
            return self._reject(text, error.position)
        deltas = self._outbox.end(text[:position])
        return WireOutput(deltas, rest=text[position:] if self._is_over else None)

    def finish(self, *, truncated: bool) -> WireOutput:
        """End; a missing closer does no harm, and an unfinished call is text unless cut off."""
        is_text = self.is_mid_call and not truncated
        return WireOutput(rejected=self.held if is_text else "")

    def _reject(self, text: str, position: int) -> WireOutput:
        """End before the closer: with what is no call, or with what just follows the last one."""
        deltas = self._outbox.end(text[:position])
        raw, rest = self._outbox.held, text[position:]
        if self.is_mid_call:
            return WireOutput(deltas, rejected=raw, rest=rest)
        return WireOutput(deltas, rest=raw + rest)

    def _between_calls(self, text: str, position: int) -> int:
        char = text[position]
        if char == "{":
            self._call = self._new_call()
            self._step = self._in_call
        elif char == self._closer[0] and self._calls_in_block:
            self._closer_chars = 1
            self._step = self._in_closer
        elif not (char.isspace() or char in (",]}" if self._calls_in_block else "[")):
            raise NotACallError(position)
        return position + 1

    def _in_call(self, text: str, position: int) -> int:
        position = self._call.feed(text, position)
        if self._call.is_complete:
            self._calls_in_block += 1
            self._step = self._between_calls
        return position

    def _in_closer(self, text: str, position: int) -> int:
        if text[position] != self._closer[self._closer_chars]:
            raise NotACallError(position)
        self._closer_chars += 1
        self._is_over = self._closer_chars == len(self._closer)
        return position + 1

    def _new_call(self) -> JsonCallReader:
        is_doubtful = self._context.in_thought and not self._calls_in_block
        return JsonCallReader(self._context.calls, self._outbox, name_comes_first=is_doubtful)
