"""Reads a block of calls with its dialect's reader, and rereads it for repair if that fails."""

from collections.abc import Callable
from dataclasses import replace

from backend.formats.dialects import Objects
from backend.formats.format import ToolFormat
from backend.output.readers.reader import Reader, ReaderContext, ReaderOutput
from backend.output.repair.markup import markup_of
from backend.output.repair.reader import RepairReader
from backend.output.repair.structure import goes_on_as_call


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
        output = self._reader.feed(text)
        if not (output.is_damaged and self._may_repair()):
            return output
        self._repair(output.rejected + (output.rest or ""))
        again = self._reader.feed("")
        return replace(again, deltas=output.deltas + again.deltas)

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply; there may be a rest."""
        if self._is_word and not truncated:
            return ReaderOutput(rejected=self.held)
        output = self._reader.finish(truncated=truncated)
        if not (output.rejected and self._may_repair()):
            return output
        self._repair(output.rejected)
        again = self._reader.finish(truncated=truncated)
        return replace(again, deltas=output.deltas + again.deltas)

    @property
    def _is_word(self) -> bool:
        """Whether this is an opener in a sentence, and a name without the structure of a call."""
        context, ledger = self._context, self._context.calls
        if not context.in_prose or ledger.is_open or len(ledger.completed) > self._calls_before:
            return False
        markup = markup_of(self._format)
        return not goes_on_as_call(markup, self.held, context.opener, in_prose=True)

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
