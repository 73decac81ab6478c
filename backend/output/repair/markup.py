"""A format's markup, its markers and tags, as distinguished from text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

from backend.formats.dialects import Dialect, Markup, Messages, NamedJson, Objects, Reading, Tags
from backend.formats.format import ToolFormat
from backend.formats.template import ARGUMENTS, NAME, Characters, Id, Template, split_at
from backend.output.repair.names import SYNTAX
from backend.output.repair.tags import opening

_PUNCTUATION = r"\s}\])>,;`"
_MARK = re.compile(r"<[^<>]+>")
_WORD = re.compile(r"[^\W\d][\w./:-]*")


@dataclass(frozen=True, slots=True)
class FormatMarkup:
    """All markup of a format.

    Attributes:
        pattern: Matches any piece of it.
        texts: The markers, without tags that contain names.
        strays: Markers and tags that do not begin anything.
        syntax: Words of the format between an opener and the name of a tool.
        words_before_name: Number of other words there, such as ids.
    """

    pattern: re.Pattern[str]
    texts: tuple[str, ...]
    strays: tuple[str, ...]
    syntax: frozenset[str]
    words_before_name: int

    @property
    def _markers(self) -> re.Pattern[str]:
        return _any_of(self.texts)

    def removed(self, text: str) -> str:
        """Return a text without markup."""
        return self.pattern.sub(" ", text)

    def without_strays(self, text: str) -> str:
        """Remove leading punctuation and markers from text that follows a call."""
        found = re.match(rf"(?:[{_PUNCTUATION}]*+(?:{_any_of(self.strays).pattern}))*", text)
        return text[found.end() :] if found else text

    def may_begin_stray(self, text: str) -> bool:
        """Tell whether text that follows a call may still become such a marker."""
        rest = re.sub(rf"\A[{_PUNCTUATION}]+", "", self.without_strays(text))
        return any(stray.startswith(rest) for stray in self.strays)

    def settled(self, text: str) -> str:
        """Return a text without an end that may become a marker."""
        for size in range(min(len(text), max(map(len, self.texts), default=0)), 0, -1):
            if any(marker.startswith(text[-size:]) for marker in self.texts):
                return text[:-size]
        return text

    def first_word(self, text: str) -> tuple[str, bool]:
        """Return the word that may be the tool's name, and whether it is complete."""
        plain = self._markers.sub(" ", self.settled(text))
        words = (found for found in _WORD.finditer(plain) if self._is_free(found[0]))
        found = next(islice(words, self.words_before_name, None), None)
        if found is None:
            return "", False
        return found[0].rstrip(":."), found.end() < len(plain)

    def _is_free(self, word: str) -> bool:
        return word.rstrip(":.") not in self.syntax


@cache
def markup_of(tool_format: ToolFormat) -> FormatMarkup:
    """Return the markup of a format."""
    readings = tool_format.readings
    texts = {*tool_format.openers, *tool_format.closers, *tool_format.tokens}
    tags = {tag for reading in readings for tag in _tags(reading)}
    markers = sorted(filter(None, (text.strip() for text in texts)), key=len, reverse=True)
    patterns = [*sorted(tags, key=len, reverse=True), *map(re.escape, markers)]
    pattern = re.compile("|".join([*patterns, "(?!)"]))
    heads = [part for reading in readings for part in _head(reading)]
    words = {word for part in heads if isinstance(part, str) for word in _WORD.findall(part)}
    before = sum(isinstance(part, Id | Characters) for part in heads)
    openers = {opener.strip() for opener in tool_format.openers}
    ends = {text for text in markers if text not in openers}
    ends |= {re.sub(r"\\(.)", r"\1", tag) for tag in tags if tag.startswith("</")}
    whole = {mark for reading in readings for mark in call_ends(reading.dialect)}
    # The beginning of a longer mark is none.
    ends = whole | {end for end in ends if not any(mark.startswith(end) for mark in whole)}
    strays = sorted(ends, key=len, reverse=True)
    return FormatMarkup(pattern, tuple(markers), tuple(strays), SYNTAX | words, before)


def call_ends(dialect: Dialect) -> Iterator[str]:
    """Yield the marks after the arguments of a named call, each on its own."""
    for template in dialect.calls if isinstance(dialect, NamedJson) else ():
        for part in split_at(template, ARGUMENTS)[1]:
            yield from _MARK.findall(part) if isinstance(part, str) else ()


def _head(reading: Reading) -> Template:
    """Return the parts of a call before the tool's name, in dialects with words there."""
    call = reading.dialect.call if isinstance(reading.dialect, NamedJson | Tags) else ()
    return call[: call.index(NAME)] if NAME in call else ()


@cache
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, texts), "(?!)"]))


def _tags(reading: Reading) -> Iterator[str]:
    """Yield regular expressions for the tags of a dialect."""
    dialect = reading.dialect
    match dialect:
        case Tags():
            for template in (dialect.call, dialect.parameter):
                yield from _closing_tags(template)
                if not str(template[0]).endswith(">"):
                    yield rf"{opening(template[0])}[^<>\n]*>?"
            yield from (re.escape(mark) for mark in (*dialect.verbatim, dialect.mark) if mark)
        case NamedJson():
            for template in dialect.calls:
                yield from _closing_tags(template)
        case Messages(calls=calls) if calls:
            yield from _tags(calls)
        case Objects() | Markup():
            yield "```(?:json)?"


def _closing_tags(template: Template) -> Iterator[str]:
    for part in template:
        text = part.strip() if isinstance(part, str) else ""
        if text.startswith("</") or (text.startswith("<|") and text.endswith("|>")):
            yield re.escape(text)
