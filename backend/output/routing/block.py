"""Reads a block of calls with its dialect's reader, and rereads it for repair if that fails."""

from collections.abc import Callable
from dataclasses import replace

from backend.formats.dialects import Objects
from backend.formats.format import ToolFormat
from backend.output.readers.reader import Reader, ReaderContext, ReaderOutput
from backend.output.repair.markup import markup_of
from backend.output.repair.names import offered_name
from backend.output.repair.reader import RepairReader
from backend.output.repair.structure import goes_on_as_call

# Openers that end like this are followed by the name.
_BEFORE_NAME = "="
# A name and what follows it must be found within so many characters.
_MAX_CHARS = 400


class Block:
    """Reads from an opener to the end of its calls; a damaged block is reread."""

    def __init__(
        self,
        tool_format: ToolFormat,
        context: ReaderContext,
        make_reader: Callable[[ReaderContext], Reader],
    ) -> None:
        """Begin at an opener.

        Args:
            tool_format: The model's format.
            context: The context in which the block begins.
            make_reader: Makes the dialect's reader.
        """
        self._format = tool_format
        self._context = context
        self._reader = make_reader(context)
        self._fed: list[str] = []
        self._calls_before = len(context.calls.completed)
        self._is_certain = False
        self.is_repaired = False

    @property
    def held(self) -> str:
        """Raw text consumed but not emitted."""
        return self._reader.held

    @property
    def is_mid_call(self) -> bool:
        """Whether the reply would end inside a call if it ended here."""
        return self._reader.is_mid_call

    def feed(self, text: str) -> ReaderOutput:
        """Read more text; not called again after `rest` was returned."""
        if not self.is_repaired:
            self._fed.append(text)
            if self._is_in_sentence():
                return ReaderOutput(rejected=self._context.opener, rest="".join(self._fed))
        output = self._reader.feed(text)
        if not (output.is_damaged and self._may_repair()):
            return output
        self._repair(output.rejected + (output.rest or ""))
        again = self._reader.feed("")
        return replace(again, deltas=output.deltas + again.deltas)

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply; there may be a rest."""
        if not truncated and self._is_in_sentence(is_last=True):
            return ReaderOutput(rejected=self.held)
        output = self._reader.finish(truncated=truncated)
        is_unfinished = self._context.calls.is_open and not truncated
        if not ((output.rejected or is_unfinished) and self._may_repair()):
            return output
        self._repair(output.rejected)
        again = self._reader.finish(truncated=truncated)
        # The reader was still following the call: what it held is a piece of the arguments.
        rejected = "" if is_unfinished and self._context.calls.is_open else again.rejected
        return replace(again, deltas=output.deltas + again.deltas, rejected=rejected)

    def _is_in_sentence(self, *, is_last: bool = False) -> bool:
        """Tell whether this is an opener in a sentence, with a name but nothing else of a call.

        Args:
            is_last: Whether the reply ends here, so that nothing will follow the name.
        """
        context, ledger = self._context, self._context.calls
        has_begun = ledger.is_open or len(ledger.completed) > self._calls_before
        if not context.in_prose or self._is_certain or has_begun:
            return False
        raw = context.opener + "".join(self._fed)
        markup = markup_of(self._format)
        word, is_whole = markup.first_word(raw)
        is_named = is_whole and bool(offered_name(word, ledger))
        goes_on = goes_on_as_call(markup, raw, context.opener, in_prose=True)
        # Either is decided for good; without a name the reader decides.
        is_decided = is_whole and (goes_on is True or not is_named)
        self._is_certain = is_decided or len(raw) > _MAX_CHARS
        if is_last:
            return not goes_on
        is_other = is_whole and context.opener.endswith(_BEFORE_NAME)
        return goes_on is False if is_named else is_other

    def _may_repair(self) -> bool:
        """Tell whether a block that its reader gave up on should be reread."""
        tools, opener = self._format, self._context.opener
        # Only its own reader can tell a bare Python list of calls from a link.
        has_objects = any(
            isinstance(reading.dialect, Objects) and opener in (reading.openers or (opener,))
            for reading in tools.readings
        )
        is_marked = opener in (*tools.openers, "") or (opener in tools.leads and has_objects)
        may_repair = (is_marked or self._context.calls.is_open) and not self._context.in_thought
        return may_repair and not self.is_repaired

    def _repair(self, unread: str) -> None:
        """Pass the block to the repairing reader.

        Args:
            unread: The text that no delta accounts for.
        """
        self.is_repaired = True
        calls = self._context.calls
        is_after_call = len(calls.completed) > self._calls_before
        raw = unread if is_after_call else self._context.opener + "".join(self._fed)
        self._reader = RepairReader(
            self._context, self._format, raw, unread=len(unread), is_after_call=is_after_call
        )
