"""One tool call whose name stands before its arguments, `f[ARGS]{…}`, while it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from backend.output.tool_calls.json_arguments import JsonArguments
from backend.output.tool_calls.markup import UNDECIDED, Tag
from backend.output.tool_calls.wire import CallLedger, NotACallError, Outbox

_Step: TypeAlias = Callable[[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """What stands between the start of a call and its arguments.

    Attributes:
        tags: The ways to write it, of which the first that fits counts; the group `name` is the
            tool's, the group `id`, where there is one, the call's. A tag may end at the brace
            that begins the arguments.
        lead_in: A text that may follow and means nothing.
    """

    tags: tuple[Tag, ...]
    lead_in: str = ""


class HeadedCallReader:
    """Reads a call behind the text that begins it, up to the end of its arguments.

    The name is handed out with the end of the head, arguments as they come. Where the wire ends
    without any, there are none, and that is `{}`.
    """

    def __init__(self, calls: CallLedger, outbox: Outbox, *, head: CallHead) -> None:
        """Begin a call.

        Args:
            calls: Numbers it and knows the names.
            outbox: Takes its deltas.
            head: How it begins.
        """
        self._calls = calls
        self._outbox = outbox
        self._head = head
        self._step: _Step = self._in_head
        self._text = ""
        self._lead_in = ""
        self._arguments = JsonArguments()
        self.is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the arguments were read to their end."""
        return self._arguments.is_whole

    @property
    def can_close(self) -> bool:
        """Whether the call is whole if the reply ends here: it may go without arguments."""
        return self.is_over or (self._step == self._before_arguments and not self._lead_in)

    def feed(self, text: str, position: int) -> int:
        """Read on, and return the position behind what was taken.

        Raises:
            NotACallError: The text is no call; what was handed out stands.
        """
        while position < len(text) and not self.is_over:
            position = self._step(text, position)
        return position

    def close(self, settled: int) -> None:
        """Hand out what is left of a call that ends here."""
        self._outbox.send(self._calls.extend(self._arguments.missing_end), settled)
        self._calls.complete()

    def _in_head(self, text: str, position: int) -> int:
        self._text += text[position]
        for tag in self._head.tags:
            found = tag.match(self._text, 0)
            if found.end == UNDECIDED:
                return position + 1
            if found.body and self._calls.is_offered(found.name):
                end = position if self._text.endswith("{") else position + 1
                call_id = found.body.groupdict().get("id") or ""
                self._outbox.send(self._calls.open(found.name, call_id), end)
                self._step = self._before_arguments
                return end
        raise NotACallError(position)

    def _before_arguments(self, text: str, position: int) -> int:
        char = text[position]
        if char.isspace():
            return position + 1
        if self._head.lead_in.startswith(self._lead_in + char):
            self._lead_in += char
            return position + 1
        if self._arguments.may_begin_with(char):
            self._step = self._in_arguments
        elif self._lead_in:
            raise NotACallError(position)
        else:
            self.is_over = True
        return position

    def _in_arguments(self, text: str, position: int) -> int:
        piece, position = self._arguments.feed(text, position)
        if piece:
            self._outbox.send(self._calls.extend(piece), position - self._arguments.kept_back)
        if self._arguments.is_malformed:
            raise NotACallError(position)
        self.is_over = self._arguments.is_whole
        return position
