"""Recognise fixed texts and tags at a position of a text that is still growing.

Where something is expected there are three answers: it ends at a position, it is not there,
or more text must tell. The lengths of tags and of the whitespace between them are bounded, so
nothing stays open for long.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

REFUTED = -1
UNDECIDED = -2

MAX_TAG_CHARS = 400
MAX_SPACE_CHARS = 64

_NOT_SPACE = re.compile(r"\S")


@dataclass(frozen=True, slots=True)
class Tag:
    """An opening tag with a part that varies, such as `<parameter=NAME>`.

    Attributes:
        start: The text that it begins with.
        body: What stands between start and end; has a group `name`.
        ends: The texts of which the first to come ends it.
        leaves_end: Whether the end is the beginning of something else.
        unfinished: What the body may look like while its end has not come.
        unescape: Turns the name into what it stands for.
    """

    start: str
    body: re.Pattern[str]
    ends: tuple[str, ...] = (">",)
    leaves_end: bool = False
    unfinished: re.Pattern[str] = re.compile(r"[^<\n]*")
    unescape: Callable[[str], str] = str

    def match(self, text: str, position: int) -> "TagMatch":
        """Look for the tag at a position."""
        begin = after(text, position, self.start)
        if begin < 0:
            return TagMatch(begin)
        limit = begin + MAX_TAG_CHARS
        found = [(at, end) for end in self.ends if (at := text.find(end, begin, limit)) >= 0]
        if not found:
            is_open = len(text) < limit and self.unfinished.fullmatch(text, begin)
            return TagMatch(UNDECIDED if is_open else REFUTED)
        at, end = min(found)
        body = self.body.fullmatch(text, begin, at)
        # What would have been refuted before its end came is refuted with its end, too.
        if body is None or not self.unfinished.fullmatch(text, begin, at + len(end) - 1):
            return TagMatch(REFUTED)
        name = self.unescape(body["name"])
        return TagMatch(at if self.leaves_end else at + len(end), body, name)


@dataclass(frozen=True, slots=True)
class TagMatch:
    """Where a tag ends, or that it is refuted or undecided; the name is empty then."""

    end: int
    body: re.Match[str] | None = None
    name: str = ""


def after(text: str, position: int, expected: str) -> int:
    """Return the position behind an expected text."""
    if text.startswith(expected, position):
        return position + len(expected)
    rest = text[position : position + len(expected)]
    is_open = position + len(rest) == len(text) and expected.startswith(rest)
    return UNDECIDED if is_open else REFUTED


def span_end(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return where a pattern ends that matches everywhere, if only nothing."""
    match = pattern.match(text, position)
    return match.end() if match else position


def after_space(text: str, position: int) -> int:
    """Return the position of the next character that is no whitespace."""
    found = _NOT_SPACE.search(text, position, position + MAX_SPACE_CHARS)
    if found:
        return found.start()
    return UNDECIDED if len(text) < position + MAX_SPACE_CHARS else REFUTED


def either(*answers: int) -> int:
    """Return the position of the one that was found; else it is refuted when all are."""
    best = max(answers)
    return best if best >= 0 else min(answers)
