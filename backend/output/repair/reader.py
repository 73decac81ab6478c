"""Rereads a block of calls that its first reader did not understand."""

import re
from collections.abc import Iterator

from backend.core.delta import Delta
from backend.formats.format import ToolFormat
from backend.output.readers.reader import ReaderContext, ReaderOutput
from backend.output.repair.calls import RepairedCall, repaired_calls
from backend.output.repair.markup import markup_of
from backend.output.repair.names import NAMESPACES, offered_name
from backend.output.repair.structure import goes_on_as_call

_MAX_CHARS_TO_NAME = 200
_MAX_BLOCK_CHARS = 1 << 16
_MAX_MARKER_CHARS = 64
_PUNCTUATION = " \n\t}])>,;`"
# A list of values, whose strings may quote a call.
_LIST_OF_DATA = re.compile(r"""[\s\[]*+(?:[-\d]|"[^"]*[{\[<]|'[^']*[{\[<])""")


class RepairReader:
    """Collects a damaged block, and emits its calls at the end.

    A block counts as damaged if the first word after its opener is the name of an offered tool,
    and the text goes on like a call. Anything else is text, and is returned at once.
    """

    def __init__(
        self,
        context: ReaderContext,
        tool_format: ToolFormat,
        raw: str,
        *,
        unread: int,
        is_after_call: bool,
    ) -> None:
        """Begin with the text fed to the first reader.

        Args:
            context: The context in which the block begins.
            tool_format: The model's format.
            raw: The text since the opener, or since the last complete call.
            unread: Length of its end that no delta accounts for.
            is_after_call: Whether complete calls of the block were emitted, so that an opener may
                begin the next block.
        """
        self._context = context
        self._format = tool_format
        self._markup = markup_of(tool_format)
        self._raw = raw
        self._unread = len(raw) - unread
        self._is_after_call = is_after_call
        self._is_call = context.calls.is_open
        self._is_too_long = False
        self._searched = 0 if is_after_call else len(context.opener)

    @property
    def held(self) -> str:
        """The whole text of the block."""
        return self._raw

    @property
    def is_mid_call(self) -> bool:
        """Whether the reply would end inside a call, which is so unless there are only markers."""
        is_between = self._is_after_call and not self._is_call
        return not is_between or bool(self._markup.without_strays(self._raw).strip(_PUNCTUATION))

    def feed(self, text: str) -> ReaderOutput:
        """Read more text, up to the end of the block or until it turns out not to be one."""
        self._raw += text
        if self._is_after_call and self._raw.lstrip().startswith(self._format.openers):
            return ReaderOutput(rest=self._raw)
        if not self._is_call and not self._decide():
            return ReaderOutput() if self._is_undecided() else self._given_up()
        end = self._end()
        if end >= 0:
            return self._repaired(end)
        return self._shortened() if len(self._raw) > _MAX_BLOCK_CHARS else ReaderOutput()

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply: the text so far is the block, unless it was cut off."""
        if truncated:
            return ReaderOutput()
        if not self._is_call:
            # With nothing to follow, the last word is complete.
            word, _ = self._markup.first_word(self._raw)
            if self._goes_on is False or (self._context.in_prose and not self._goes_on):
                return self._given_up()
            self._is_call = bool(offered_name(word, self._context.calls))
        return self._repaired(len(self._raw), is_last=True)

    def _decide(self) -> bool:
        """Tell whether the block is known to be a call."""
        word, is_whole = self._markup.first_word(self._raw)
        is_offered = is_whole and bool(offered_name(word, self._context.calls))
        self._is_call = is_offered and bool(self._goes_on)
        return self._is_call

    @property
    def _goes_on(self) -> bool | None:
        """Whether text goes on like a call after the first word; `None` if more text decides."""
        if self._is_after_call:
            return True
        opener, in_prose = self._context.opener, self._context.in_prose
        is_bare = opener in self._format.leads
        if is_bare and _LIST_OF_DATA.match(self._raw, self._raw.find("[")):
            return False
        return goes_on_as_call(self._markup, self._raw, opener, in_prose=in_prose)

    def _is_undecided(self) -> bool:
        is_short = len(self._raw) < len(self._context.opener) + _MAX_CHARS_TO_NAME
        if is_short and self._is_after_call and self._markup.may_begin_stray(self._raw):
            return True
        word, is_whole = self._markup.first_word(self._raw)
        if is_whole and offered_name(word, self._context.calls):
            return is_short and self._goes_on is None
        parts = {word, *re.split("[.:]", word)}
        return is_short and not is_whole and any(map(self._may_be_name, parts))

    def _may_be_name(self, beginning: str) -> bool:
        is_syntax = any(word.startswith(beginning) for word in self._markup.syntax | NAMESPACES)
        return is_syntax or self._context.calls.may_become_offered(beginning)

    def _end(self) -> int:
        """Return the end of the block: after a closer, or before the next opener."""
        closers = [
            place + len(closer)
            for closer in self._format.closers
            if (place := self._raw.find(closer, self._searched)) >= 0
        ]
        opener = self._context.opener.strip() or "\0"
        again = self._raw.find(opener, self._searched) if len(opener) > 1 else -1
        found = [place for place in (*closers, again) if place >= 0]
        self._searched = max(self._searched, len(self._raw) - _MAX_MARKER_CHARS)
        return min(found, default=-1)

    def _shortened(self) -> ReaderOutput:
        """Stop reading calls in a block that is too long; an emitted one stays unfinished."""
        if not self._context.calls.is_open:
            return self._given_up(len(self._raw))
        self._is_too_long = True
        self._raw = self._raw[-_MAX_MARKER_CHARS:]
        self._searched = 0
        return ReaderOutput()

    def _repaired(self, end: int, *, is_last: bool = False) -> ReaderOutput:
        """Emit the calls of the block, and the text after the last one."""
        raw, rest = self._raw[:end], self._raw[end:]
        ledger = self._context.calls
        if self._is_too_long:
            ledger.abandon()
            return ReaderOutput(rest=rest)
        is_short = len(raw) <= _MAX_BLOCK_CHARS
        calls = repaired_calls(self._format, raw, ledger, is_cut=is_last) if is_short else []
        if not calls and not ledger.is_open:
            return self._given_up(end)
        deltas: list[Delta] = []
        if is_last and not calls:
            # A call interrupted by a stop stays unfinished: invalid arguments run no tool.
            text = self._markup.removed(raw[self._unread :]).strip(_PUNCTUATION)
            return ReaderOutput(rejected=text)
        others = calls
        if ledger.is_open:
            is_first = bool(calls) and calls[0].name == ledger.open_name
            is_short = is_first and is_last and self._lacks_arguments(calls[0])
            deltas += self._completed(calls[0] if is_first and not is_short else None)
            others = calls[1:] if is_first else calls
        for call in others:
            deltas += self._handed_out(call, is_short=is_last and self._lacks_arguments(call))
        after = raw[calls[-1].end :] if calls else raw[self._unread :]
        text = self._markup.removed(after).lstrip(_PUNCTUATION).rstrip()
        # What follows no call is a piece of one.
        text = text if calls else text.rstrip(_PUNCTUATION)
        return ReaderOutput(tuple(deltas), rest=text + rest)

    def _completed(self, call: RepairedCall | None) -> Iterator[Delta]:
        """Yield the rest of the arguments of a partly emitted call."""
        ledger = self._context.calls
        delta = ledger.settle(call.arguments) if call else None
        if call is None or delta is None:
            # Do not invent anything: invalid arguments run no tool.
            ledger.abandon()
            return
        yield delta
        ledger.complete(*call.reasons)

    def _lacks_arguments(self, call: RepairedCall) -> bool:
        """Tell whether a call that nothing has closed lacks required arguments."""
        return call.is_open and self._context.calls.lacks_arguments(call.name, call.arguments)

    def _handed_out(self, call: RepairedCall, *, is_short: bool) -> Iterator[Delta]:
        ledger = self._context.calls
        yield ledger.open(call.name)
        if is_short:
            # Cut off: without the last brace no tool runs.
            yield ledger.break_off(call.arguments)
            return
        yield ledger.extend(call.arguments)
        ledger.complete(*call.reasons)

    def _given_up(self, end: int = 0) -> ReaderOutput:
        """Return the text, up to the end of the block; without markup if it was a call."""
        opener = "" if self._is_after_call else self._context.opener
        if self._is_after_call and not self._is_call:
            return ReaderOutput(rest=self._markup.without_strays(self._raw))
        if self._is_call and self._context.in_prose:
            return ReaderOutput(rejected=self._raw[:end], rest=self._raw[end:], is_damaged=True)
        if self._is_call and opener not in self._format.leads:
            text = self._markup.removed(self._raw[:end]).strip()
            return ReaderOutput(rejected=text, rest=self._raw[end:], is_damaged=True)
        return ReaderOutput(rejected=opener, rest=self._raw.removeprefix(opener))
