"""Reads consecutive calls: between markers, in a list, or bare.

The reader of a call determines where the call and its JSON end: markers inside strings are text.
"""

from dataclasses import dataclass
from typing import Protocol

from backend.output.readers.calls.named_call import CallHead, NamedCall
from backend.output.readers.calls.object_call import CallKeys, ObjectCall
from backend.output.readers.markup import REFUTED, UNDECIDED, after
from backend.output.readers.reader import NotACallError, ReaderContext, ReaderOutput
from backend.output.readers.stepping_reader import SteppingReader

_BARE_OPENERS = ("{", "[")
_BRACKETS = frozenset("]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """The parts of a block of calls.

    Attributes:
        call: The shape of a call: an object with these keys, or a head before the arguments.
        call_start: The text that begins a call, also at the end of the opener. If empty, there is
            one call, right after the opener.
        call_end: The text that ends a call; if empty, its JSON ends it.
        starts: Texts that may precede the first call, such as a repeated opener.
        ends: Texts that end the block, if there are any.
        separators: Texts that may follow a call, and are plain text if no other call follows.
        fillers: Texts that may follow a call and are always meaningless.
    """

    call: CallKeys | CallHead
    call_start: str = ""
    call_end: str = ""
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    fillers: tuple[str, ...] = ()

    @property
    def all_ends(self) -> tuple[str, ...]:
        """Texts longer than a bracket that end arguments, a call or the block."""
        fillers = (filler for filler in self.fillers if filler not in _BRACKETS)
        return tuple(filter(None, (self.call_end, *self.ends, *fillers)))


class Call(Protocol):
    """Reads one call, starting after the text that begins it."""

    @property
    def is_over(self) -> bool:
        """Whether the following text is no longer part of it."""

    @property
    def is_whole(self) -> bool:
        """Whether its JSON has been read to the end."""

    @property
    def can_close(self) -> bool:
        """Whether the call is complete if the reply ends here."""

    def read(self, text: str, position: int) -> int:
        """Return the position after the consumed text, or a negative number as steps do."""

    def close(self, settled: int) -> None:
        """Emit the rest of the call."""


class CallBlockReader(SteppingReader):
    """Reads one block, from its opener to its end or to text that is not a call.

    A call with an end marker is complete when that marker, or anything else, follows its JSON.

    Without a marker before it, and inside a thought, where a model may quote its instructions,
    an object is a call only if nothing in it contradicts that.
    """

    def __init__(self, context: ReaderContext, *, block: CallBlock) -> None:
        super().__init__(context, opener_is_call=False)
        self._block = block
        self._call = self._new_call()
        if context.opener.endswith(block.call_start):
            self._open_call()

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; a missing end does no harm, and an unfinished call is text unless cut off."""
        if truncated:
            return ReaderOutput()
        self._begin("")
        if self._is_in_call and self._call.can_close:
            self._close_call(0)
        deltas = self._outbox.end("")
        return ReaderOutput(deltas, rejected=self.held if self.is_mid_call else "")

    def _reject(self, text: str, position: int) -> ReaderOutput:
        """Give up before the end of the block."""
        if self._is_in_call and self._call.is_whole:
            self._close_call(position)
        return super()._reject(text, position)

    def _before_call(self, position: int) -> int:
        start = self._skip_space(position)
        if start == len(self._buffer):
            return UNDECIDED
        marker, end = self._marker_at(start)
        if end == REFUTED:
            # A complete call ends before the whitespace after it.
            raise NotACallError(position if self._calls_begun else start)
        if end >= 0:
            self._pass_marker(marker, end)
        return end

    def _marker_at(self, position: int) -> tuple[str, int]:
        """Return the longest marker at a position, and its end."""
        ends = {marker: after(self._buffer, position, marker) for marker in self._markers()}
        if UNDECIDED in ends.values():
            return "", UNDECIDED
        marker = max(ends, key=lambda marker: ends[marker], default="")
        return marker, ends.get(marker, REFUTED)

    def _markers(self) -> tuple[str, ...]:
        """Return the texts allowed here."""
        block = self._block
        if self._calls_begun:
            call_end = (block.call_end,) if self._is_in_call else ()
            others = (*call_end, *block.ends, *block.separators, *block.fillers)
        else:
            others = (*block.starts, self._context.opener)
        return tuple(filter(None, (block.call_start, *others)))

    def _pass_marker(self, marker: str, end: int) -> None:
        block = self._block
        if marker == block.call_start:
            if self._is_in_call:
                self._close_call(end - len(marker))
            self._open_call()
        elif marker == block.call_end or marker in block.ends:
            if self._is_in_call:
                self._close_call(end)
            self._is_over = marker in block.ends
        elif marker in block.fillers and not self._is_in_call:
            self._outbox.drop(end)

    def _open_call(self) -> None:
        self._calls_begun += 1
        self._call = self._new_call()
        self._step = self._in_call

    def _in_call(self, position: int) -> int:
        end = self._call.read(self._buffer, position)
        if self._call.is_over:
            self._step = self._before_call
            if self._call.is_whole and not self._block.call_end:
                self._close_call(end)
        return end

    def _close_call(self, settled: int) -> None:
        self._call.close(settled)
        self._calls_ended += 1

    def _new_call(self) -> Call:
        calls, call = self._context.calls, self._block.call
        if isinstance(call, CallHead):
            return NamedCall(calls, self._outbox, head=call, ends=self._block.all_ends)
        is_quotable = self._context.in_thought and not self._calls_ended
        is_doubtful = is_quotable or self._context.opener in _BARE_OPENERS
        ends = self._block.all_ends
        return ObjectCall(calls, self._outbox, keys=call, ends=ends, is_doubtful=is_doubtful)
