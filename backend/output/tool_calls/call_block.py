"""Calls one behind the other, between markers, in a list, or bare: what holds for all of them.

Where a call and its JSON end, the reader of the call tells: markers inside strings are text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.output.tool_calls.headed_call import CallHead, HeadedCallReader
from backend.output.tool_calls.json_call import CallKeys, JsonCallReader
from backend.output.tool_calls.wire import NotACallError, Outbox, WireContext, WireOutput

_Step: TypeAlias = Callable[[str, int], int]

_BARE_OPENERS = ("{", "[")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """What a block of calls is made of.

    Attributes:
        call: What a call looks like: an object with these keys, or a head before its arguments.
        call_start: The text that begins a call; an opener that ends with it does so too.
            Without one, there is one call, behind the opener.
        call_end: The text that ends a call; without one, its JSON does.
        starts: Texts that may stand before the first call, as the opener itself may once more.
        ends: Texts that end the block, where there are any.
        separators: Texts that may stand behind a call, and that count if no call follows.
        fillers: Texts that may stand behind a call and never count.
    """

    call: CallKeys | CallHead
    call_start: str = ""
    call_end: str = ""
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    fillers: tuple[str, ...] = ()


class CallReader(Protocol):
    """Reads one call, behind the text that begins it."""

    @property
    def is_over(self) -> bool:
        """Whether what follows is no part of it."""

    @property
    def is_whole(self) -> bool:
        """Whether its JSON was read to the end."""

    @property
    def can_close(self) -> bool:
        """Whether the call is whole if the reply ends here."""

    def feed(self, text: str, position: int) -> int:
        """Read on, and return the position behind what was taken."""

    def close(self, settled: int) -> None:
        """Hand out what is left of the call."""


class CallBlockCursor:
    """Reads one block, from its opener to its end, or to what is no call.

    A call with an end marker is whole when that marker, or anything else, follows its JSON.

    Without a marker before it, and inside a thought, where a model may quote its instructions,
    an object is a call only if nothing in it speaks against that.
    """

    def __init__(self, context: WireContext, *, block: CallBlock) -> None:
        self._context = context
        self._block = block
        self._outbox = Outbox(context.opener)
        self._marker = ""
        self._chars_behind = 0
        self._calls_begun = 0
        self._calls_ended = 0
        self._is_over = False
        self._step: _Step = self._between_calls
        self._call = self._new_call()
        if context.opener.endswith(block.call_start):
            self._begin_call()

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._outbox.held

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, or none was complete yet."""
        return self._is_in_call or not self._calls_ended

    @property
    def _is_in_call(self) -> bool:
        return self._calls_begun > self._calls_ended

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
        """End; a missing end does no harm, and an unfinished call is text unless cut off."""
        if truncated:
            return WireOutput()
        self._outbox.begin()
        if self._is_in_call and self._call.can_close:
            self._end_call(0)
        deltas = self._outbox.end("")
        return WireOutput(deltas, rejected=self.held if self.is_mid_call else "")

    def _reject(self, text: str, position: int) -> WireOutput:
        """End before the block's end: with what is no call, or with what follows the last one."""
        if self._is_in_call and self._call.is_whole:
            self._end_call(position - self._chars_behind)
        deltas = self._outbox.end(text[:position])
        # What might have become a marker here may be one elsewhere.
        raw, rest = self.held.removesuffix(self._marker), self._marker + text[position:]
        if self.is_mid_call:
            return WireOutput(deltas, rejected=raw, rest=rest)
        return WireOutput(deltas, rest=raw + rest)

    def _between_calls(self, text: str, position: int) -> int:
        marker = self._marker + text[position]
        if marker.isspace():
            self._chars_behind += 1
        elif marker in (markers := self._markers()):
            self._marker = ""
            self._chars_behind = 0
            self._pass_marker(marker, position + 1)
        elif any(expected.startswith(marker) for expected in markers):
            self._marker = marker
            self._chars_behind += 1
        else:
            raise NotACallError(position)
        return position + 1

    def _markers(self) -> tuple[str, ...]:
        """Return the texts that may stand here."""
        block = self._block
        if self._calls_begun:
            call_end = (block.call_end,) if self._is_in_call else ()
            behind = (*call_end, *block.ends, *block.separators, *block.fillers)
        else:
            behind = (*block.starts, self._context.opener)
        return tuple(filter(None, (block.call_start, *behind)))

    def _pass_marker(self, marker: str, position: int) -> None:
        block = self._block
        if marker == block.call_start:
            if self._is_in_call:
                self._end_call(position - len(marker))
            self._begin_call()
        elif marker == block.call_end or marker in block.ends:
            if self._is_in_call:
                self._end_call(position)
            self._is_over = marker in block.ends
        elif marker in block.fillers and not self._is_in_call:
            self._outbox.drop(position)

    def _begin_call(self) -> None:
        self._calls_begun += 1
        self._call = self._new_call()
        self._step = self._in_call

    def _in_call(self, text: str, position: int) -> int:
        position = self._call.feed(text, position)
        if self._call.is_over:
            self._chars_behind = 0
            self._step = self._between_calls
            if self._call.is_whole and not self._block.call_end:
                self._end_call(position)
        return position

    def _end_call(self, settled: int) -> None:
        self._call.close(settled)
        self._calls_ended += 1

    def _new_call(self) -> CallReader:
        calls, call = self._context.calls, self._block.call
        if isinstance(call, CallHead):
            return HeadedCallReader(calls, self._outbox, head=call)
        is_quotable = self._context.in_thought and not self._calls_ended
        is_doubtful = is_quotable or self._context.opener in _BARE_OPENERS
        return JsonCallReader(calls, self._outbox, keys=call, is_doubtful=is_doubtful)
