"""A block of calls in a reply, from its opener to its end, and a marker that may be a quotation."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from backend.formats.format import ToolFormat
from backend.output.readers.offered_names import offered_name
from backend.output.readers.patterns import MAX_SPACE_CHARS, Piece, choice, sequence, spaced
from backend.output.readers.reader import Reader, ReaderContext, ReaderOutput
from backend.output.repair import RepairReader
from backend.output.tag_repair import goes_on_as_call, markup_of

# Openers that end like this are followed by the name.
_BEFORE_NAME = "="
# A name and what follows it must be found within so many characters.
_MAX_CHARS = 400


@lru_cache
def _empty_block(tool_format: ToolFormat, opener: str) -> Piece | None:
    """Return the rest of a block without calls, which says that there are none.

    It begins with an empty list, or has nothing between markers that are special tokens.
    """
    if opener not in tool_format.openers:
        return None
    brackets = ("]",) if opener.endswith("[") else ("[]", "{}")
    empty = choice(*(sequence(*map(spaced, pair)) for pair in brackets))
    readings = tool_format.readings_at(opener)
    ends = {end for each in readings for end in (each.end, *each.other_ends)} & tool_format.strays
    is_special = opener in tool_format.strays
    return choice(empty, *map(spaced, sorted(ends))) if is_special else empty


class Block:
    """Reads from an opener to the end of its calls; a damaged block is reread.

    Attributes:
        is_empty: Whether the block says that there are no calls.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        context: ReaderContext,
        make_reader: Callable[[ReaderContext], Reader],
        *,
        echo: str = "",
    ) -> None:
        """Begin at an opener; a block with the text `echo` has no calls."""
        self._echo = echo
        self._format = tool_format
        self._context = context
        self._reader = make_reader(context)
        self._fed: list[str] = []
        self._calls_before = len(context.calls.completed)
        self._is_certain = False
        self.is_repaired = False
        is_text = context.in_thought or context.in_prose
        self._empty = None if is_text else _empty_block(tool_format, context.opener)
        self._waiting = ""
        self.is_empty = False

    @property
    def opener(self) -> str:
        """The marker that it begins at."""
        return self._context.opener

    @property
    def held(self) -> str:
        """Raw text consumed but not emitted."""
        return self._reader.held + self._waiting

    @property
    def is_mid_call(self) -> bool:
        """Whether the reply would end inside a call if it ended here."""
        return self._reader.is_mid_call

    @property
    def has_calls(self) -> bool:
        """Whether a call in it has been read whole."""
        return len(self._context.calls.completed) > self._calls_before

    def text_before(self, rest: str) -> str:
        """Return the text of a sound block, from its opener to the rest; else nothing."""
        text = "" if self.is_repaired else "".join(self._fed)
        return text.removesuffix(rest).lstrip()

    def feed(self, text: str) -> ReaderOutput:
        """Read more text."""
        if self._echo:
            return self._feed_echo(text)
        if self._empty is None:
            return self._feed(text)
        text = self._waiting + text
        if found := re.compile(self._empty.whole).match(text):
            self.is_empty = True
            return ReaderOutput(rest=text[found.end() :])
        if len(text) < MAX_SPACE_CHARS and re.compile(self._empty.begun).fullmatch(text):
            self._waiting = text
            return ReaderOutput()
        self._empty, self._waiting = None, ""
        return self._feed(text)

    def _feed_echo(self, text: str) -> ReaderOutput:
        text, echo = self._waiting + text, self._echo
        if text.startswith(echo):
            self.is_empty = True
            return ReaderOutput(rest=text[len(echo) :])
        if echo.startswith(text):
            self._waiting = text
            return ReaderOutput()
        self._echo = self._waiting = ""
        return self.feed(text)

    def _feed(self, text: str) -> ReaderOutput:
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
        if self._waiting and self._echo:
            self.is_empty, self._waiting = True, ""
            return ReaderOutput()
        if self._waiting:
            return self._finish_waiting(truncated=truncated)
        # The repairing reader, which alone has the whole text then, decides for itself.
        if not (truncated or self.is_repaired) and self._is_in_sentence(is_last=True):
            return ReaderOutput(rejected=self.held)
        output = self._reader.finish(truncated=truncated)
        is_unfinished = self._context.calls.is_open and not truncated
        is_damaged = is_unfinished or (output.rejected and not truncated)
        if not (is_damaged and self._may_repair()):
            return output
        self._repair(output.rejected)
        again = self._reader.finish(truncated=truncated)
        # The reader was still following the call: what it held is a piece of the arguments.
        rejected = "" if is_unfinished and self._context.calls.is_open else again.rejected
        return replace(again, deltas=output.deltas + again.deltas, rejected=rejected)

    def _finish_waiting(self, *, truncated: bool) -> ReaderOutput:
        text, self._waiting, self._empty = self._waiting, "", None
        output = self._feed(text)
        if output.rest is not None:
            return output
        last = self.finish(truncated=truncated)
        return replace(last, deltas=output.deltas + last.deltas)

    def _is_in_sentence(self, *, is_last: bool = False) -> bool:
        """Tell whether this is an opener in a sentence, with a name but nothing else of a call.

        `is_last` says that the reply ends here, so that nothing will follow the name.
        """
        context, ledger = self._context, self._context.calls
        has_begun = ledger.is_open or self.has_calls
        if not context.in_prose or self._is_certain or has_begun:
            return False
        raw = f"{context.opener}{''.join(self._fed)}"[: _MAX_CHARS + 1]
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
        is_marked = opener in (*tools.openers, *tools.object_leads, "")
        may_repair = (is_marked or self._context.calls.is_open) and not self._context.in_thought
        return may_repair and not self.is_repaired

    def _repair(self, unread: str) -> None:
        """Pass the block to the repairing reader; no delta accounts for the `unread` text."""
        self.is_repaired = True
        is_after_call = self.has_calls
        raw = unread if is_after_call else self._context.opener + "".join(self._fed)
        self._reader = RepairReader(
            self._context, self._format, raw, unread=len(unread), is_after_call=is_after_call
        )


class Quotation:
    """The raw text from a marker on, until it is known whether it is a quotation."""

    def __init__(self, opener: str, reader: Reader) -> None:
        """Begin at a marker and the whitespace before it; the reader's calls do not count."""
        self.opener = opener
        self._reader = reader
        self._raw: list[str] = []
        self.is_call = False

    @property
    def text(self) -> str:
        """All raw text so far, with the marker."""
        return self.opener + "".join(self._raw)

    def read(self, text: str) -> ReaderOutput:
        """Read more text, until there is or cannot be a call.

        If there is a call, all text after the marker is returned as the rest: it waits, and must be
        passed to `add`.
        """
        output = self._reader.feed(text)
        self._raw.append(text)
        if not output.deltas:
            return output
        self.is_call = True
        rest = "".join(self._raw)
        self._raw = []
        return ReaderOutput(rest=rest)

    def add(self, text: str) -> None:
        """Keep text that follows a call."""
        self._raw.append(text)
