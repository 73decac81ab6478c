"""One tool call whose name stands before its arguments, `f[ARGS]{…}`, while it is written."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from backend.output.readers.markup import REFUTED, UNDECIDED, after, span_end
from backend.output.readers.patterns import Pattern
from backend.output.readers.reader import CallLedger, NotACallError, Outbox
from backend.output.readers.values.json_arguments import JsonArguments

_SPACE = re.compile(r"\s*")

_Step: TypeAlias = Callable[[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """The text between the start of a call and its arguments.

    Attributes:
        patterns: The ways to write it, of which the first that fits counts. It may end before
            the brace that begins the arguments.
        lead_ins: Texts of which one may follow and means nothing, longer ones first.
    """

    patterns: tuple[Pattern, ...]
    lead_ins: tuple[str, ...] = ()


class NamedCall:
    """Reads a call after the text that begins it, up to the end of its arguments.

    The name is handed out with the first of the arguments, these as they come. A call without
    any has `{}`.
    """

    def __init__(self, calls: CallLedger, outbox: Outbox, *, head: CallHead) -> None:
        """Begin a call.

        Args:
            calls: Numbers it and knows the names.
            outbox: Takes its deltas.
            head: The shape of its beginning.
        """
        self._calls = calls
        self._outbox = outbox
        self._head = head
        self._step: _Step = self._in_head
        self._name = self._id = ""
        self._has_lead_in = False
        self._arguments = JsonArguments()
        self.is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the arguments were read to their end."""
        return self._arguments.is_whole

    @property
    def can_close(self) -> bool:
        """Whether the call is whole if the reply ends here: it may go without arguments."""
        return self.is_over or (self._step == self._before_arguments and not self._has_lead_in)

    def read(self, text: str, position: int) -> int:
        """Return the position after what was taken, or a negative number while text must tell.

        Raises:
            NotACallError: The text is no call; what was handed out stands.
        """
        return self._step(text, position)

    def close(self, settled: int) -> None:
        """Hand out the rest of a call that ends here."""
        self._send(self._arguments.missing_end, settled)
        self._calls.complete()

    def _send(self, piece: str, settled: int) -> None:
        """Hand out a piece of the arguments; the call begins with the first."""
        if self._name:
            self._outbox.send(self._calls.open(self._name, self._id), settled)
            self._name = ""
        self._outbox.send(self._calls.extend(piece), settled)

    def _in_head(self, text: str, position: int) -> int:
        for pattern in self._head.patterns:
            found = pattern.match(text, position)
            if found.end == UNDECIDED:
                return UNDECIDED
            if found.end >= 0 and self._calls.is_offered(found.name):
                self._name, self._id = found.name, found.call_id
                self._step = self._before_arguments
                return found.end
        raise NotACallError(position)

    def _before_arguments(self, text: str, position: int) -> int:
        start = span_end(_SPACE, text, position)
        if start > position:
            return start
        if position == len(text):
            return UNDECIDED
        if self._arguments.may_begin_with(text[position]):
            self._step = self._in_arguments
            return position
        end = self._lead_in_end_at(text, position)
        if end == REFUTED and self._has_lead_in:
            raise NotACallError(position)
        if end == REFUTED:
            self.is_over = True
            return position
        self._has_lead_in = end >= 0
        return end

    def _lead_in_end_at(self, text: str, position: int) -> int:
        """Return where a fence ends, with the name of its language or without."""
        if self._has_lead_in:
            return REFUTED
        ends = (after(text, position, lead_in) for lead_in in self._head.lead_ins)
        return next((end for end in ends if end != REFUTED), REFUTED)

    def _in_arguments(self, text: str, position: int) -> int:
        if position == len(text):
            return UNDECIDED
        piece, position = self._arguments.feed(text, position)
        if piece:
            self._send(piece, position - self._arguments.kept_back)
        if self._arguments.is_malformed:
            raise NotACallError(position)
        self.is_over = self._arguments.is_whole
        return position
