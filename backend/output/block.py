"""A block of calls in a reply: from its opener to its end, sound or damaged, or a quotation."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from backend.core.step import ContentDelta, Delta
from backend.formats.dialects import LIST_KEY, NESTING_KEYS, NamedJson, Tags, text_of
from backend.formats.format import ToolFormat
from backend.output.readers.bare_python import list_end
from backend.output.readers.patterns import (
    MAX_SPACE_CHARS,
    REFUTED,
    SPACE,
    UNDECIDED,
    Piece,
    choice,
    fixed,
    sequence,
    spaced,
)
from backend.output.readers.reader import (
    NAMESPACES,
    Names,
    Reader,
    ReaderContext,
    ReaderOutput,
    offered_name,
)
from backend.output.readers.typed_values import ParameterTypes, describes_arguments
from backend.output.repair import (
    ARGUMENT_KEYS,
    CALL_KEYS,
    NAME_KEYS,
    RepairedCall,
    block_ends,
    repaired_calls,
)
from backend.output.tag_repair import goes_on_as_call, markup_of
from backend.output.text import JsonText

_MAX_CHARS_TO_NAME = 200
_MAX_BLOCK_CHARS = 1 << 16
_MAX_MARKER_CHARS = 64
_PUNCTUATION = " \n\t}])>,;`"
_QUOTES_AND_BRACKETS = "\"'])} \n\t"
# Characters that may stand between calls, and around them.
_BETWEEN = " \n\t,;[]"
_BEFORE_BODY = re.compile(rf"\A[{re.escape(_BETWEEN)}]*+(```(?:json)?[{re.escape(_BETWEEN)}]*+)?")
# The name of a call may be a key, which has no part in the text before it.
_BEGUN_KEY = re.compile(r"\{\s*\"\Z")
_LISTED_CALL = sequence(
    *(fixed("{"), spaced('"name"'), spaced(":"), SPACE),
    *(Piece(r'"[^"\\]{1,64}"', r'"[^"\\]{0,64}"?'), spaced(",")),
    *(choice(spaced('"arguments"'), spaced('"parameters"')), spaced(":"), spaced("{")),
)
_LISTED, _BEGUN_LISTED = re.compile(_LISTED_CALL.whole), re.compile(_LISTED_CALL.begun)
# An object without markers, as far as it tells whether it is a call.
_BARE = re.compile(rf"[\s\[]*+\{{\s*+(?:[\"']{LIST_KEY}[\"']\s*+:\s*+\[\s*+\{{\s*+)?")
_KEY = re.compile(r"""\s*+["']?([\w.:/-]++)["']?\s*+:\s*+""")
_BEGUN_BARE_KEY = re.compile(r"""\s*+["']?[\w.:/-]*+["']?\s*+""")
# A list may begin with calls of tools that take no arguments.
_NEXT = sequence(spaced("}"), spaced(","), spaced("{"))
_NEXT_OBJECT, _BEGUN_NEXT = re.compile(_NEXT.whole), re.compile(_NEXT.begun)
_NO_KEY = re.compile(r"\s*+[\w.-]+\s*+[},]")
_SCALAR = re.compile(r"""(?:"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|[^\s,{}\[\]"']++)\s*+""")


def _is_bare_call(raw: str, position: int, names: Names) -> bool | None:
    """Tell whether an object without markers has the keys of a call; `None` if more text decides.

    It has them up to its arguments, or the only key is the name of a tool.

    Args:
        position: Where its first key begins.
    """
    is_first, name, is_list = True, "", raw.lstrip().startswith("[")
    while found := _KEY.match(raw, position):
        key, position = found[1], found.end()
        follows = raw[position : position + 1]
        if key in ARGUMENT_KEYS:
            return _are_bare_arguments(raw, position, names.parameter_types(name))
        if key not in CALL_KEYS:
            is_name = is_first and bool(offered_name(key, names)) and follows in ("", "{")
            return None if is_name and not follows else is_name
        if follows == "{" and key in NESTING_KEYS:
            position += 1
            continue
        value = _SCALAR.match(raw, position)
        if value is None or value.end() == len(raw):
            return None
        name = offered_name(value[0].strip().strip("\"'"), names) if key in NAME_KEYS else name
        if is_list and (next_object := _NEXT_OBJECT.match(raw, value.end())):
            position = next_object.end()
            continue
        if raw[value.end()] != ",":
            is_open = is_list and _BEGUN_NEXT.fullmatch(raw, value.end())
            return None if is_open else raw[value.end()] != "}"
        position = value.end() + 1
        is_first = False
    if _NO_KEY.match(raw, position):
        return False
    return None if _BEGUN_BARE_KEY.fullmatch(raw, position) else True


def _has_key(raw: str, position: int) -> bool | None:
    """Tell whether an object begins with a key; `None` if more text decides."""
    if _KEY.match(raw, position):
        return True
    return None if _BEGUN_BARE_KEY.fullmatch(raw, position) else False


def _are_bare_arguments(raw: str, position: int, types: ParameterTypes) -> bool | None:
    """Tell whether arguments without markers begin there, not a list, or a schema of them."""
    if position == len(raw) or (is_schema := describes_arguments(raw, position, types)) is None:
        return None
    return not (is_schema or raw[position] == "[")


@lru_cache
def _inner_openers(tool_format: ToolFormat, opener: str) -> tuple[str, ...]:
    """Return the openers of the calls in a block, or after other words than a call's."""
    dialects = (reading.dialect for reading in tool_format.readings_at(opener))
    named = (each for each in dialects if isinstance(each, Tags | NamedJson))
    begins = tuple(text_of(each.call[:1]) for each in named)
    if opener not in tool_format.openers or not opener.endswith(">"):
        return ()
    return tuple(each for each in tool_format.openers if any(b.startswith(each) for b in begins))


class RepairReader:
    """Collects a damaged block, and emits its calls at the end.

    A block counts as damaged if the first word after its opener is the name of an offered tool,
    and the text goes on like a call. So does one that begins with a call of another tool: that call
    is text, but others of the block are not. Anything else is text, and is returned at once.

    Attributes:
        held: The whole text of the block.
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
            raw: The text since the opener, or since the last complete call.
            unread: Length of its end that no delta accounts for.
            is_after_call: Whether complete calls of the block were emitted, so that an opener may
                begin the next block.
        """
        self._context = context
        self._format = tool_format
        self._markup = markup_of(tool_format)
        self.held = raw
        self._unread = len(raw) - unread
        self._is_after_call = is_after_call
        self._is_call = context.calls.is_open
        self._has_others = False
        self._is_too_long = False
        self._searched = self._followed = 0 if is_after_call else len(context.opener)
        self._json = JsonText()
        # A list of other calls than objects is whole.
        self._list_end = list_end(raw, context.calls) if context.opener == "[" else -1
        # The first mark in a string, which ends the block after all if that string has no end.
        self._quoted_end = -1
        self._breaks = 0
        begins = _inner_openers(tool_format, context.opener)
        may_be_prose = not (is_after_call or context.in_prose)
        self._inner_openers = begins if may_be_prose else ()
        self._is_prose = False

    @property
    def is_mid_call(self) -> bool:
        """Whether the reply would end inside a call, which is so unless there are only markers."""
        if self._is_call or not self._is_after_call:
            return True
        text = self._markup.without_strays(self.held).strip(_PUNCTUATION)
        return bool(text) and not self._markup.may_begin_stray(text)

    def feed(self, text: str) -> ReaderOutput:
        """Read more text, up to the end of the block or until it turns out not to be one."""
        self.held += text
        if self._is_after_call and (rest := self._next_block()):
            return ReaderOutput(rest=rest)
        if not (self._is_call or self._has_others) and not self._decide():
            if self._is_undecided():
                return ReaderOutput()
            self._has_others = self._markup.begins_with_call(self._body)
            if not self._has_others:
                return self._without_opener()
        end = self._end()
        if end >= 0:
            return self._beside_others(end) if self._has_others else self._repaired(end)
        return self._shortened() if len(self.held) > _MAX_BLOCK_CHARS else ReaderOutput()

    def _next_block(self) -> str:
        """Return the text from the opener of another block on, if that follows."""
        text = self._markup.without_strays(self.held)
        openers = tuple(opener.lstrip() for opener in self._format.openers)
        return text if text.lstrip().startswith(openers) else ""

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply: the text so far is the block, unless it was cut off."""
        if self._has_others:
            self.held = self._markup.settled(self.held) if truncated else self.held
            end = len(self.held) if truncated else self._last_end()
            return self._beside_others(end, is_last=end == len(self.held))
        if truncated:
            return self._given_up() if self._is_prose else ReaderOutput()
        if not self._is_call:
            # With nothing to follow, the last word is complete.
            word, _ = self._markup.first_word(self.held)
            is_doubtful = self._context.in_prose or self._is_bare
            if self._goes_on is False or (is_doubtful and not self._goes_on):
                return self._given_up()
            self._is_call = bool(offered_name(word, self._context.calls))
        end = self._last_end()
        return self._repaired(end, is_last=end == len(self.held))

    def _decide(self) -> bool:
        """Tell whether the block is known to be a call."""
        word, is_whole = self._markup.first_word(self.held)
        is_offered = is_whole and bool(offered_name(word, self._context.calls))
        if is_offered and self._is_bare and not self._is_after_call:
            # After a marker the call belongs to another block.
            before = self.held.partition(word)[0]
            is_offered = not any(opener in before for opener in self._format.openers)
        self._is_call = is_offered and bool(self._goes_on)
        return self._is_call

    @property
    def _goes_on(self) -> bool | None:
        """Whether text goes on like a call after the first word; `None` if more text decides."""
        if self._is_after_call:
            return True
        opener, in_prose = self._context.opener, self._context.in_prose
        if self._begins_with_name:
            return _has_key(self.held, len(opener))
        if self._is_bare and (begun := _BARE.match(self.held)):
            return _is_bare_call(self.held, begun.end(), self._context.calls)
        if self._is_bare_list:
            return self._list_end >= 0
        return goes_on_as_call(self._markup, self.held, opener, in_prose=in_prose)

    @property
    def _body(self) -> str:
        """The text where the first call begins; nothing where no call of another tool counts."""
        context = self._context
        is_marked = context.opener in self._format.openers or self._is_after_call
        opener = "" if self._is_after_call else context.opener
        body = "" if context.in_prose else self.held.removeprefix(opener)
        body = _BEFORE_BODY.sub("", body)
        # A bare list of data may have names too.
        may_be_calls = self._is_bare_list and self._goes_on is not False
        is_listed = may_be_calls and (_LISTED.match(body) or self._may_be_listed(body))
        return body if is_marked or is_listed else ""

    @property
    def _is_bare(self) -> bool:
        """Whether the block has no marker."""
        return self._context.opener in self._format.leads or self._begins_with_name

    @property
    def _begins_with_name(self) -> bool:
        return self._format.begins_with_name(self._context.opener)

    @property
    def _is_bare_list(self) -> bool:
        return self._context.opener == "["

    def _is_undecided(self) -> bool:
        is_short = len(self.held) < len(self._context.opener) + _MAX_CHARS_TO_NAME
        if is_short and self._is_after_call and self._markup.may_begin_stray(self.held):
            return True
        if is_short and self._is_bare_list and self._may_be_listed(self._body):
            return True
        word, is_whole = self._markup.first_word(self.held)
        if is_whole and offered_name(word, self._context.calls):
            return is_short and self._goes_on is None
        parts = {word, *re.split("[.:]", word)}
        if is_short and not is_whole and any(map(self._may_be_name, parts)):
            return True
        return is_short and self._markup.may_begin_with_call(self._body)

    @staticmethod
    def _may_be_listed(body: str) -> bool:
        """Tell whether a text may become a call in a bare list."""
        return bool(body) and _BEGUN_LISTED.fullmatch(body) is not None

    def _without_opener(self) -> ReaderOutput:
        """Leave out an opener that words follow, and then a call, which needs none."""
        place = self._place_of_call() if self._inner_openers else REFUTED
        self._is_prose = place == UNDECIDED
        if self._is_prose:
            return ReaderOutput()
        if place == REFUTED:
            return self._given_up()
        prose = self.held[len(self._context.opener) : place].lstrip("\n")
        return ReaderOutput(rest=prose + self.held[place:])

    def _place_of_call(self) -> int:
        """Return where a call of an offered tool begins in the words after an opener."""
        begin = len(self._context.opener)
        limit = begin + _MAX_CHARS_TO_NAME
        marks = (*self._inner_openers, *self._format.closers, self._context.opener.lstrip())
        found = [(self.held.find(each, begin, limit + len(each)), each) for each in marks]
        place, mark = min((each for each in found if each[0] >= 0), default=(limit, ""))
        if not mark and len(self.held) < limit + max(map(len, marks)):
            return UNDECIDED
        if mark not in self._inner_openers:
            return REFUTED
        raw = self.held[place : place + _MAX_CHARS_TO_NAME]
        word, is_whole = self._markup.first_word(raw)
        if is_whole or len(raw) == _MAX_CHARS_TO_NAME:
            return place if is_whole and offered_name(word, self._context.calls) else REFUTED
        return UNDECIDED

    def _may_be_name(self, beginning: str) -> bool:
        is_syntax = any(word.startswith(beginning) for word in self._markup.syntax | NAMESPACES)
        return is_syntax or self._context.calls.may_become_offered(beginning)

    def _end(self) -> int:
        """Return the end of the block: after a closer, or before the next opener.

        A mark in a string of JSON or of Python ends nothing, unless the string turns out to be
        damaged.
        """
        if self._list_end >= 0 and not self._is_after_call:
            return self._list_end
        while (found := self._next_mark()) is not None:
            place, end = found
            self._follow(place)
            if not self._json.is_in_string or self._is_damaged:
                return self._quoted_end if self._is_damaged else end
            if self._quoted_end < 0:
                self._quoted_end, self._breaks = end, self._json.breaks
            self._searched = place + 1
        self._searched = max(self._searched, len(self.held) - _MAX_MARKER_CHARS)
        if self._quoted_end >= 0:
            self._follow(self._searched)
        return self._quoted_end if self._is_damaged else -1

    @property
    def _is_damaged(self) -> bool:
        """Whether other text has ended the JSON with the first mark in a string."""
        return self._quoted_end >= 0 and self._json.breaks > self._breaks

    def _last_end(self) -> int:
        """Return the end of the block where the reply ends too."""
        self._follow(len(self.held))
        is_open = self._quoted_end >= 0 and self._json.is_in_string
        return self._quoted_end if is_open or self._is_damaged else len(self.held)

    def _follow(self, end: int) -> None:
        self._json.follow(self.held[self._followed : end])
        self._followed = max(self._followed, end)

    def _next_mark(self) -> tuple[int, int] | None:
        """Return the place of the next mark that may end the block, and the end there."""
        marks = self._format.closers
        if self._has_others and self._context.opener == self._format.opener:
            marks = block_ends(self._format, self._context.opener) or marks
        places = ((self.held.find(mark, self._searched), len(mark)) for mark in marks)
        found = [(place, place + chars) for place, chars in places if place >= 0]
        opener = self._context.opener.strip() or "\0"
        again = self.held.find(opener, self._searched) if len(opener) > 1 else -1
        found += [(again, again)] if again >= 0 else []
        return min(found, key=lambda each: each[1], default=None)

    def _shortened(self) -> ReaderOutput:
        """Stop reading calls in a block that is too long; an emitted one stays unfinished."""
        if not self._context.calls.is_open:
            return self._given_up(len(self.held))
        self._is_too_long = True
        self.held = self.held[-_MAX_MARKER_CHARS:]
        self._searched = self._followed = 0
        self._json = JsonText()
        self._quoted_end = -1
        return ReaderOutput()

    def _repaired(self, end: int, *, is_last: bool = False) -> ReaderOutput:
        """Emit the calls of the block, and the text after the last one."""
        raw, rest = self.held[:end], self.held[end:]
        ledger = self._context.calls
        if self._is_too_long:
            ledger.abandon()
            return ReaderOutput(rest=rest)
        is_short = len(raw) <= _MAX_BLOCK_CHARS
        calls = repaired_calls(self._format, raw, ledger, is_cut=is_last) if is_short else []
        if ledger.is_open and calls and calls[0].name != ledger.open_name:
            # The text that was emitted as arguments contains no calls.
            calls = [call for call in calls if call.begin >= self._unread]
        if self._context.in_prose:
            # A sentence may name a tool between markers.
            calls = [c for c in calls if not self._is_name_alone(c)]
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
            deltas += self._handed_out(call, is_short=self._lacks_arguments(call))
        after = raw[calls[-1].end :] if calls else raw[self._unread :]
        text = self._markup.removed(after).lstrip(_PUNCTUATION).rstrip()
        # Text that follows no call is a piece of one.
        text = text if calls else text.rstrip(_PUNCTUATION)
        # A lone quote is that of a call in a string.
        text = text if text.strip(_QUOTES_AND_BRACKETS) else ""
        return ReaderOutput(tuple(deltas), rest=text + rest)

    def _beside_others(self, end: int, *, is_last: bool = False) -> ReaderOutput:
        """Emit the calls of a block that has calls of other tools too, which are text."""
        raw, rest = self.held[:end], self.held[end:]
        ledger = self._context.calls
        is_short = len(raw) <= _MAX_BLOCK_CHARS
        found = repaired_calls(self._format, raw, ledger, has_others=True) if is_short else []
        calls = [call for call in found if not call.is_open]
        if not calls:
            # An apparent call in the arguments of another tool is none.
            text = self._text_between(raw) if self._is_after_call else raw
            return ReaderOutput(rejected=text, rest=None if is_last else rest, is_damaged=True)
        deltas: list[Delta] = []
        begin = 0
        for call in calls:
            if text := self._text_between(self._without_head(raw[begin : call.begin])):
                deltas.append(ContentDelta(text))
            deltas += self._handed_out(call, is_short=False)
            begin = call.end
        text = self._text_between(raw[begin:])
        if is_last:
            return ReaderOutput(tuple(deltas), rejected=text)
        return ReaderOutput(tuple(deltas), rest=text + rest)

    def _without_head(self, text: str) -> str:
        """Return the text before a call without the words of its head, and the marker of these."""
        begin = max((text.rfind(opener) for opener in self._format.openers), default=-1)
        head = text[begin:] if begin >= 0 else ""
        ends = (*self._format.closers, *self._format.inner_ends)
        has_call = any(mark in head for mark in ("{", *ends))
        is_other = has_call or self._markup.has_words(head, self._context.calls)
        return text if is_other else text[: len(text) - len(head)]

    def _text_between(self, text: str) -> str:
        """Return the text of calls of other tools, without the markers of their block."""
        text = text.removeprefix(self._context.opener)
        marks = tuple(filter(None, (*self._format.openers, *self._format.closers)))
        before = _BEFORE_BODY.match(self.held.removeprefix(self._context.opener))
        if before and before[1]:
            text, marks = _BEFORE_BODY.sub("", text), (*marks, "```")
        text = _BEGUN_KEY.sub("", self._markup.without_strays(text).rstrip()).strip(_BETWEEN)
        while mark := next(filter(text.endswith, marks), ""):
            text = text.removesuffix(mark).rstrip(_BETWEEN)
        return text

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

    def _is_name_alone(self, call: RepairedCall) -> bool:
        """Tell whether a call of a tool with required arguments has none."""
        names = self._context.calls
        return call.arguments == "{}" and names.lacks_arguments(call.name, call.arguments)

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
            return ReaderOutput(rest=self._markup.without_strays(self.held), is_damaged=True)
        if self._is_call and self._context.in_prose:
            return ReaderOutput(rejected=self.held[:end], rest=self.held[end:], is_damaged=True)
        if self._is_call and opener not in self._format.leads:
            text = self._markup.removed(self.held[:end]).strip()
            return ReaderOutput(rejected=text, rest=self.held[end:], is_damaged=True)
        rest = self.held.removeprefix(opener)
        body = rest.lstrip()
        # With the space after it, the opener of a call to another tool is no stray marker.
        space = rest[: len(rest) - len(body)] if self._markup.begins_call(body) else ""
        return ReaderOutput(rejected=opener + space, rest=rest.removeprefix(space))


# Openers that end like this are followed by the name.
_BEFORE_NAME = "="
# A name and the text after it must be found within so many characters.
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
    ends = {end for each in readings for end in each.ends} & tool_format.strays
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
        is_open = self._context.calls.is_open
        is_unfinished = is_open and not truncated
        gave_up = is_open and output.is_damaged
        is_damaged = gave_up or is_unfinished or (output.rejected and not truncated)
        if not (is_damaged and self._may_repair()):
            return output
        self._repair(output.rejected + (output.rest or ""))
        again = self._reader.finish(truncated=truncated)
        # The reader was still following the call: its held text is a piece of the arguments.
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
        is_marked |= tools.begins_with_name(opener)
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
