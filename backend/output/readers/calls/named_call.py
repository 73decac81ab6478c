"""Reads one tool call with its name before its arguments, `f[ARGS]{…}`, incrementally."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from backend.output.readers.call_ids import is_nameless
from backend.output.readers.markup import REFUTED, UNDECIDED, after, span_end
from backend.output.readers.patterns import NO_MATCH, Pattern
from backend.output.readers.reader import CallLedger, NotACallError, Outbox
from backend.output.readers.values.json_arguments import JsonArguments

_SPACE = re.compile(r"\s*")

_Step: TypeAlias = Callable[[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """The text between the start of a call and its arguments.

    Attributes:
        patterns: The ways to write it; the first match wins. A pattern may end before the brace
            that begins the arguments.
        loose: A head in which any word is the id, in formats whose ids contain the name.
        lead_ins: Meaningless texts, one of which may follow; longer ones first.
    """

    patterns: tuple[Pattern, ...]
    loose: Pattern | None = None
    lead_ins: tuple[str, ...] = ()


class NamedCall:
    """Reads a call from the text after its start to the end of its arguments.

    The name is emitted with the first of the arguments, which are emitted as they arrive. A call
    without arguments has `{}`.
    """

    def __init__(
        self, calls: CallLedger, outbox: Outbox, *, head: CallHead, ends: tuple[str, ...] = ()
    ) -> None:
        """Begin a call.

        Args:
            calls: Numbers the call and knows the tool names.
            outbox: Collects its deltas.
            head: Shape of its beginning.
            ends: Texts that end it.
        """
        self._calls = calls
        self._outbox = outbox
        self._head = head
        self._step: _Step = self._in_head
        self._name = self._id = ""
        self._is_nameless = False
        self._unsent = ""
        self._has_lead_in = False
        self._arguments = JsonArguments(ends)
        self.is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the arguments have been read to their end."""
        return self._arguments.is_whole

    @property
    def can_close(self) -> bool:
        """Whether the call is complete if the reply ends here: arguments may be missing."""
        if self.is_over or self._step != self._before_arguments or self._is_nameless:
            return self.is_over
        return not (self._has_lead_in or self._calls.lacks_arguments(self._name, "{}"))

    def read(self, text: str, position: int) -> int:
        """Return the position after the consumed text, or a negative number if more is needed.

        Raises:
            NotACallError: The text is not a call; emitted deltas stand.
        """
        return self._step(text, position)

    def close(self, settled: int) -> None:
        """Emit the rest of a call that ends here."""
        self._send(self._arguments.missing_end, settled)
        self._calls.complete()

    def _send(self, piece: str, settled: int) -> None:
        """Emit a piece of the arguments; the first piece begins the call."""
        if self._is_nameless:
            self._unsent += piece
            return
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
        return self._in_loose_head(text, position)

    def _in_loose_head(self, text: str, position: int) -> int:
        """Read an id in another form; without a name in it, the arguments tell the tool."""
        found = self._head.loose.match(text, position) if self._head.loose else NO_MATCH
        if found.end == UNDECIDED:
            return UNDECIDED
        self._name = self._calls.name_in_id(found.name)
        if found.end < 0 or not (self._name or is_nameless(found.name)):
            raise NotACallError(position)
        self._name = self._name or self._calls.only_name
        self._is_nameless = not self._name
        self._step = self._before_arguments
        return found.end

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
            self._find_name(position)
            self.is_over = True
            return position
        self._has_lead_in = end >= 0
        return end

    def _lead_in_end_at(self, text: str, position: int) -> int:
        """Return the end of a fence opener, with or without a language name."""
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
        if self._arguments.is_whole:
            self._find_name(position)
            self.is_over = True
        return position

    def _find_name(self, position: int) -> None:
        """Choose the only tool that takes the arguments, if no name has told it."""
        if not self._is_nameless:
            return
        keys = json.loads(self._unsent + self._arguments.missing_end).keys()
        self._name, *others = (*self._calls.names_fitting(keys), "")
        if not self._name or len(others) > 1:
            raise NotACallError(position)
        self._is_nameless = False
        if self._unsent:
            self._send(self._unsent, position - 1)
