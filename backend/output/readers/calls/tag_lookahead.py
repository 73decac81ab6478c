"""Looks ahead in a block of tagged calls without consuming text."""

import re
from collections.abc import Sequence

from backend.output.readers.calls.tagged_dialect import TaggedDialect
from backend.output.readers.markup import REFUTED, UNDECIDED, after, after_space, either
from backend.output.readers.patterns import NO_MATCH, Match
from backend.output.readers.reader import MAX_NAME_CHARS, ReaderContext
from backend.output.readers.stepping_reader import SteppingReader

_MAX_STRAYS = 3
_NAME = re.compile(r"""\s*["']*([^\s<>"'/]*)""")


class TagLookahead(SteppingReader):
    """Recognises the tags of a dialect.

    Returns positions in the buffer, or negative numbers as in `markup`.
    """

    def __init__(self, context: ReaderContext, *, dialect: TaggedDialect) -> None:
        self._is_in_block = not dialect.call_begin.startswith(context.opener)
        super().__init__(context, opener_is_call=not self._is_in_block)
        self._dialect = dialect

    def _any_at(self, position: int, texts: Sequence[str]) -> int:
        """Return the position after any of the texts."""
        return either(REFUTED, *(after(self._buffer, position, text) for text in texts))

    def _skip_strays(self, position: int, texts: Sequence[str]) -> int:
        """Return the position after repeated closing tags."""
        for _ in range(_MAX_STRAYS):
            position = after_space(self._buffer, position)
            end = self._any_at(position, texts) if position >= 0 else REFUTED
            if position < 0 or end == REFUTED:
                return position
            if end == UNDECIDED:
                return UNDECIDED
            position = end
        return after_space(self._buffer, position)

    def _end_of_call_at(self, position: int) -> int:
        """Match the end of the call, and inside a block the text that must follow."""
        call_ends = self._dialect.call_ends
        end = self._any_at(position, call_ends)
        if end < 0 or not self._is_in_block:
            return end
        position = self._skip_strays(end, call_ends)
        if position < 0:
            return position
        # The next block may follow at once: models forget the end of a block, or repeat its start.
        next_block = after(self._buffer, position, self._context.opener)
        next_call = either(self._next_call_at(position).end, self._damaged_call_at(position))
        return either(self._block_end_at(position), next_call, next_block)

    def _damaged_call_at(self, position: int) -> int:
        """Match the beginning of a call to an offered tool, whatever follows."""
        begin = after(self._buffer, position, self._dialect.call_begin)
        if begin < 0:
            return begin
        name = _NAME.match(self._buffer, begin)
        if name is None or name.end() == len(self._buffer):
            return UNDECIDED if len(self._buffer) - begin < MAX_NAME_CHARS else REFUTED
        return begin if self._context.calls.is_offered(name[1]) else REFUTED

    def _block_end_at(self, position: int) -> int:
        return self._any_at(position, self._dialect.block_ends)

    def _next_call_at(self, position: int) -> Match:
        call = self._dialect.call.match(self._buffer, position)
        is_foreign = call.end >= 0 and not self._context.calls.is_offered(call.name)
        return NO_MATCH if is_foreign else call
