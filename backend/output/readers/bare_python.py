"""Reads calls in Python without markers, which sentences and other code may look like."""

import re
from dataclasses import replace

from backend.output.readers.json_calls import FENCE
from backend.output.readers.literal_calls import LiteralCallReader, LiteralDialect
from backend.output.readers.patterns import (
    MAX_TAG_CHARS,
    REFUTED,
    UNDECIDED,
    after,
    after_space,
    span_end,
)
from backend.output.readers.reader import (
    NAMESPACES,
    CallLedger,
    MakeReader,
    Reader,
    ReaderContext,
    ReaderOutput,
    offered_name,
)

_HEAD = re.compile(r"\s*+([\w./:-]++)\s*+[({]")
_BEGUN_HEAD = re.compile(r"\s*+([\w./:-]*+)\s*+")
_BETWEEN = re.compile(r"\s*+[,;\]]")
_IN_LINES = re.compile(r"[ \t\r]*+[,;\n]")
_NO_STRUCTURE = re.compile(r"""[^"'()\[\]{}]*+""")
_NO_QUOTE = re.compile(r"""[^"'\\]*+""")
# Characters that may follow a string: after another quote in it, it goes on.
_AFTER_LISTED_STRING = frozenset(",)]}:;")
_TRIPLE = ('"""', "'''")
# An apostrophe begins no string; the prefix of one is a single letter.
_WORD = re.compile(r"\w\w\Z")
_WORD_CHARS = 2
# Arguments as an object, which no program has there.
_WITH_OBJECT = re.compile(r"[\s\[]*+[\w./:-]++\s*+\(\s*+(?:\*\*\s*+)?\{")
# Brackets too many, and the end of a fence.
_STRAY = ",;)]}"
_IN_FENCE = f"{_STRAY} \t\r\n"
_IN_LINE = f"{_STRAY} \t\r`"
# A call of another tool, or text on a line of its own.
_NO_SENTENCE = re.compile(r"[ \t\r]*+(?:\n|[,;]?\s*+\w[\w./:-]*+\()")
_STRING_END = re.compile(r"""["']\s*+\)\s*+\]?\s*+\Z""")


class _CallsEnd:
    """Finds the end of a list or a line of calls, however their arguments are written.

    Attributes:
        end: Number of characters after the opener, `REFUTED` or `UNDECIDED`.
        has_calls: Whether the name of an offered tool was found.
        has_semicolons: Whether calls are separated by these.
    """

    def __init__(self, names: CallLedger, opener: str = "[") -> None:
        """Begin after the bracket of a list, or a name with its bracket."""
        self._names = names
        self._buffer = ""
        self._dropped = self._position = 0
        self.has_calls = opener != "["
        self._between_calls = _IN_LINES if self.has_calls else _BETWEEN
        self._depth = 1 if self.has_calls else 0
        self._quote = ""
        self.end = UNDECIDED
        self.has_semicolons = False

    @property
    def place(self) -> int:
        """Number of characters after the opener that are read."""
        return self._dropped + self._position

    def follow(self, text: str) -> int:
        """Read more text; return the end."""
        self._buffer += text
        while self.end == UNDECIDED and self._position < len(self._buffer):
            step = self._in_string if self._quote else self._in_call
            position = (step if self._depth else self._between)(self._position)
            if position < 0:
                self.end = position
                break
            self._position = position
        drop = max(0, self._position - _WORD_CHARS)
        self._buffer = self._buffer[drop:]
        self._dropped += drop
        self._position -= drop
        return self.end

    def _between(self, position: int) -> int:
        """Read the name of a call, a comma, or the end of the calls."""
        found = self._between_calls.match(self._buffer, position) if self.has_calls else None
        if found:
            self.has_semicolons |= found[0].endswith(";")
            if found[0].endswith(("]", "\n")):
                self.end = self._dropped + found.end()
            return found.end()
        if (head := _HEAD.match(self._buffer, position)) and offered_name(head[1], self._names):
            self.has_calls = True
            self._depth = 1
            return head.end()
        is_short = len(self._buffer) < position + MAX_TAG_CHARS
        begun = _BEGUN_HEAD.fullmatch(self._buffer, position) if is_short else None
        return UNDECIDED if begun and self._may_be_name(begun[1]) else REFUTED

    def _may_be_name(self, word: str) -> bool:
        """Tell whether a word, or the part of it after namespaces, may become a name."""
        while not (self._names.may_become_offered(word) or self._may_be_namespace(word)):
            namespace, *after_it = re.split("[.:]", word, maxsplit=1)
            if namespace not in NAMESPACES or not after_it:
                return False
            word = after_it[0]
        return True

    def _may_be_namespace(self, word: str) -> bool:
        return any(space.startswith(word) for space in NAMESPACES)

    def _in_call(self, position: int) -> int:
        start = span_end(_NO_STRUCTURE, self._buffer, position)
        if start > position:
            return start
        char = self._buffer[position]
        if char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        elif not _WORD.search(self._buffer, position - _WORD_CHARS, position):
            if len(self._buffer) < position + len(_TRIPLE[0]):
                return UNDECIDED
            is_triple = self._buffer.startswith(_TRIPLE, position)
            self._quote = char * len(_TRIPLE[0]) if is_triple else char
            return position + len(self._quote)
        return position + 1

    def _in_string(self, position: int) -> int:
        start = span_end(_NO_QUOTE, self._buffer, position)
        if start > position:
            return start
        if self._buffer[position] == "\\":
            return position + 2 if len(self._buffer) > position + 1 else UNDECIDED
        end = after(self._buffer, position, self._quote)
        follows = after_space(self._buffer, end) if end >= 0 else end
        if follows == REFUTED or (
            follows >= 0 and self._buffer[follows] not in _AFTER_LISTED_STRING
        ):
            return position + 1
        self._quote = "" if follows >= 0 else self._quote
        return follows


def list_end(text: str, names: CallLedger) -> int:
    """Return the end of the list of calls that a text begins with; negative without one."""
    begin = text.find("[") + 1
    end = _CallsEnd(names).follow(text[begin:])
    return begin + end if end >= 0 else end


class LiteralListReader:
    """Reads a list at once: brackets at the start of an answer are mostly prose, or code.

    It has calls only as a whole, if it ends its line, or a marker follows.
    """

    def __init__(
        self, context: ReaderContext, *, dialect: LiteralDialect, marks: tuple[str, ...]
    ) -> None:
        """Begin after the bracket; the format has these `marks`."""
        self._context = context
        self._dialect = dialect
        self._ends = ("\n", *marks)
        self._list = _CallsEnd(context.calls)
        self._raw: list[str] = []

    @property
    def held(self) -> str:
        """All text: nothing is emitted before the end."""
        return self._context.opener + "".join(self._raw)

    @property
    def is_mid_call(self) -> bool:
        """Whether the list is open."""
        return self._list.end == UNDECIDED

    def feed(self, text: str) -> ReaderOutput:
        """Read more text, up to the end of the list, or until it turns out to be none."""
        self._raw.append(text)
        end = self._list.end if self._list.end >= 0 else self._list.follow(text)
        if end == UNDECIDED:
            return ReaderOutput()
        raw = "".join(self._raw)
        if end >= 0:
            # Other lines in a fence are a program.
            follows = raw[end:].lstrip(_IN_FENCE if self._context.in_fence else _IN_LINE)
            if follows.startswith(self._ends):
                return self._read(raw)
            is_short = len(raw) < end + MAX_TAG_CHARS
            if is_short and any(mark.startswith(follows) for mark in self._ends):
                return ReaderOutput()
        return ReaderOutput(rejected=self._context.opener, rest=raw)

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply; only the end of the list may be missing."""
        raw = "".join(self._raw)
        if self._list.end >= 0:
            output = self._read(raw)
            return ReaderOutput(rejected=self.held) if output.is_damaged else output
        if truncated:
            return ReaderOutput()
        calls = self._context.calls.of_trial()
        output = self._finished(calls, raw)
        if calls.completed and not (calls.is_open or output.rejected):
            return self._finished(self._context.calls, raw)
        return ReaderOutput(rejected=self.held)

    def _finished(self, calls: CallLedger, raw: str) -> ReaderOutput:
        reader = self._reader(calls)
        output = reader.feed(raw)
        last = reader.finish(truncated=False)
        return replace(last, deltas=(*output.deltas, *last.deltas))

    def _reader(self, calls: CallLedger) -> LiteralCallReader:
        return LiteralCallReader(replace(self._context, calls=calls), dialect=self._dialect)

    def _read(self, raw: str) -> ReaderOutput:
        """Read a list, unless it is damaged."""
        text, rest = f"{raw[: self._list.end]}\n", raw[self._list.end :]
        trial = self._reader(self._context.calls.of_trial()).feed(text)
        is_odd = self._list.has_semicolons or _WITH_OBJECT.match(raw)
        if is_odd or trial.is_damaged or trial.rest != "\n":
            return ReaderOutput(rejected=self._context.opener, rest=raw, is_damaged=True)
        deltas = self._reader(self._context.calls).feed(text).deltas
        return ReaderOutput(deltas, rest=rest.lstrip(_STRAY))


class BarePythonReader:
    """Reads calls that begin an answer as they arrive, if their line has nothing but calls.

    The text after the first calls decides whether they are in a sentence, unless they are long.
    """

    def __init__(
        self, context: ReaderContext, *, make_reader: MakeReader, marks: tuple[str, ...]
    ) -> None:
        """Begin after the bracket of a list, or a name with its bracket."""
        self._context = context
        self._make_reader = make_reader
        self._marks = marks
        self._calls = _CallsEnd(context.calls, context.opener)
        self._raw = ""
        self._reader: Reader | None = None

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._reader.held if self._reader else self._context.opener + self._raw

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, or may be."""
        return self._reader.is_mid_call if self._reader else self._calls.end == UNDECIDED

    def feed(self, text: str) -> ReaderOutput:
        """Read more text, or give it back once it is no line of calls."""
        if self._reader:
            return self._reader.feed(text)
        room = MAX_TAG_CHARS - len(self._raw)
        self._raw += text
        if self._calls.end == UNDECIDED:
            self._calls.follow(text[:room])
        are_calls = self._are_calls()
        if are_calls is None:
            return ReaderOutput()
        if not are_calls:
            return ReaderOutput(rejected=self._context.opener, rest=self._raw)
        self._reader = self._make_reader(self._context)
        return self._reader.feed(self._raw)

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply; there may be a rest."""
        if self._reader:
            return self._reader.finish(truncated=truncated)
        if self._are_calls(is_last=not truncated) is False:
            return ReaderOutput(rejected=self._context.opener, rest=self._raw)
        reader = self._make_reader(self._context)
        output = reader.feed(self._raw)
        if output.rest is not None:
            return output
        last = reader.finish(truncated=truncated)
        return replace(last, deltas=output.deltas + last.deltas)

    def _are_calls(self, *, is_last: bool = False) -> bool | None:
        """Tell whether the text so far is a line of calls; `None` if more text decides."""
        end = self._calls.end
        if end == UNDECIDED:
            return True if is_last or len(self._raw) >= MAX_TAG_CHARS else None
        if end == REFUTED:
            return self._may_go_on(self._raw[self._calls.place :], is_last=is_last)
        if self._context.in_fence:
            follows = self._raw[end:].strip(_IN_FENCE)
            is_open = FENCE.startswith(follows) and not is_last
            return None if is_open else follows.startswith(FENCE) or not follows
        follows = self._raw[end:].lstrip(_IN_LINE)
        # Text that begins with a bracket is a special token.
        if self._raw[:end].endswith("\n") or follows.startswith(("\n", "<", *self._marks)):
            return True
        is_short = len(self._raw) < end + MAX_TAG_CHARS
        if is_short and any(mark.startswith(follows) for mark in self._marks):
            return True if is_last and not follows else None
        return not follows

    def _may_go_on(self, text: str, *, is_last: bool) -> bool | None:
        """Tell whether text after calls is none of a sentence: a mistake in a string, perhaps."""
        if not self._calls.has_calls or _NO_SENTENCE.match(text):
            return True
        line, line_end, _ = text.partition("\n")
        if not (is_last or line_end) and len(text) < MAX_TAG_CHARS:
            return None
        return _STRING_END.search(line) is not None
