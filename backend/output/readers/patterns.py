"""Regular expressions that tell whether a text matches, may still match, or does not match."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

REFUTED = -1
UNDECIDED = -2

MAX_SPACE_CHARS = 64
MAX_TAG_CHARS = 400

_NOT_SPACE = re.compile(r"\S")


def after(text: str, position: int, expected: str) -> int:
    """Return the position after an expected text."""
    if text.startswith(expected, position):
        return position + len(expected)
    rest = text[position : position + len(expected)]
    is_open = position + len(rest) == len(text) and expected.startswith(rest)
    return UNDECIDED if is_open else REFUTED


def after_any(text: str, position: int, expected: tuple[str, ...]) -> int:
    """Return the position after the longest of these texts that is there."""
    if found := _longest_of(expected).match(text, position):
        return found.end()
    left = len(text) - position
    longer = (each for each in expected if len(each) > left)
    is_open = any(text.startswith(each[:left], position) for each in longer)
    return UNDECIDED if is_open else REFUTED


@lru_cache(maxsize=1024)
def _longest_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def span_end(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return the end of a match; the pattern must be able to match empty text."""
    match = pattern.match(text, position)
    return match.end() if match else position


def after_space(text: str, position: int) -> int:
    """Return the position of the next non-whitespace character."""
    found = _NOT_SPACE.search(text, position, position + MAX_SPACE_CHARS)
    if found:
        return found.start()
    return UNDECIDED if len(text) < position + MAX_SPACE_CHARS else REFUTED


def either(*answers: int) -> int:
    """Return the first match; without one, refuted only if all answers are."""
    best = max(answers)
    return best if best >= 0 else min(answers)


_ATTRIBUTE_NAME = r"[\w:.-]+"
# Models forget one of two quotes, or double one. No value has two readings: such tags take
# exponential time. A value that lacks a quote ends at the end of its tag, whatever follows.
_VALUE_END = r"(?=[\s<>/|]|\Z)"
_QUOTED = rf""""{{1,2}}[^">\n]*"{{1,2}}{_VALUE_END}|'{{1,2}}[^'>\n]*'{{1,2}}{_VALUE_END}"""
_VALUE = rf"""(?>{_QUOTED}|["']?[^\s"'<>/|=]+["']?)"""
_BEGUN_VALUE = r"""(?:"{1,2}[^">\n]*|'{1,2}[^'>\n]*|["']?[^\s"'<>/|=]*["']?)"""
_ATTRIBUTE = re.compile(rf"\s({_ATTRIBUTE_NAME})\s*=\s*({_VALUE})")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a pattern.

    Attributes:
        whole: A regular expression for the part.
        begun: A regular expression, without groups, for all its prefixes.
    """

    whole: str
    begun: str

    @property
    def ungrouped(self) -> str:
        """The `whole` expression without named groups."""
        return re.sub(r"\(\?P<\w+>", "(?:", self.whole)


def attributes_in(text: str) -> dict[str, str]:
    """Return the values of attributes, without their quotes."""
    return {key: value.strip("\"'") for key, value in _ATTRIBUTE.findall(text)}


SPACE = Piece(r"\s*+", r"\s*+")
SPACE_IN_LINE = Piece(r"[^\S\n]*+", r"[^\S\n]*+")
ATTRIBUTES = Piece(
    rf"(?P<attributes>(?:\s+{_ATTRIBUTE_NAME}\s*=\s*{_VALUE})*\s*)",
    rf"(?:\s+{_ATTRIBUTE_NAME}\s*=\s*{_VALUE})*"
    rf"(?:\s+(?:{_ATTRIBUTE_NAME}(?:\s*(?:=\s*{_BEGUN_VALUE})?)?)?)?",
)
_QUOTED_VALUE = r"""(?:"[^"<>\n]*"|'[^'<>\n]*')"""
# After a name that is no attribute itself.
OTHER_ATTRIBUTES = Piece(
    rf"(?:[^\S\n]+{_ATTRIBUTE_NAME}={_QUOTED_VALUE})*",
    rf"(?:[^\S\n]+{_ATTRIBUTE_NAME}={_QUOTED_VALUE})*"
    rf"""(?:[^\S\n]+(?:{_ATTRIBUTE_NAME}(?:=(?:"[^"<>\n]*|'[^'<>\n]*)?)?)?)?""",
)
# The end of a tag that is also its own end.
CLOSED = Piece("(?P<closed>/?)", "/?")


def fixed(text: str) -> Piece:
    """Return a piece that matches one text."""
    begun = ""
    for char in reversed(text):
        begun = f"(?:{re.escape(char)}{begun})?"
    return Piece(re.escape(text), begun)


def spaced(text: str) -> Piece:
    """Return a piece that matches one text, after whitespace."""
    return sequence(SPACE, fixed(text))


def any_of(chars: str, *, least: int = 1, group: str = "") -> Piece:
    """Return a piece that matches characters of a class, as many as possible."""
    count = "+" if least else "*"
    name = f"?P<{group}>" if group else "?:"
    return Piece(f"({name}{chars}{count})", f"{chars}*")


def ahead(*texts: str) -> Piece:
    """Return a piece that consumes nothing but must be followed by one of these texts."""
    whole = "|".join(map(re.escape, texts))
    begun = "|".join(fixed(text).begun for text in texts)
    return Piece(f"(?={whole})", f"(?:{begun})")


def maybe(*pieces: Piece) -> Piece:
    """Return a piece that matches all of these in sequence, or nothing."""
    inner = sequence(*pieces)
    return Piece(f"(?:{inner.whole})?", inner.begun)


def choice(*pieces: Piece) -> Piece:
    """Return a piece that matches any one of these."""
    return Piece(
        f"(?:{'|'.join(piece.whole for piece in pieces)})",
        f"(?:{'|'.join(piece.begun for piece in pieces)})",
    )


def grouped(name: str, *pieces: Piece) -> Piece:
    """Return a piece that stores the text of these in a named group."""
    inner = sequence(*pieces)
    return Piece(f"(?P<{name}>{inner.whole})", inner.begun)


def sequence(*pieces: Piece) -> Piece:
    """Return a piece that matches these in sequence."""
    begun = []
    before = ""
    for piece in pieces:
        begun.append(before + piece.begun)
        before += piece.ungrouped
    whole = "".join(piece.whole for piece in pieces)
    return Piece(whole, f"(?:{'|'.join(reversed(begun))})")


@dataclass(frozen=True, slots=True)
class Match:
    """The end of a match, or its refutation or indecision, which leave the rest empty.

    Attributes:
        end: A position, `REFUTED` or `UNDECIDED`.
        name: Name of the tool or the argument.
        kind: Type of the value as spelled in the tag.
        attributes: The other attributes of the tag.
        is_closed: Whether the tag is also its own end, `<a/>`.
    """

    end: int
    name: str = ""
    kind: str | None = None
    call_id: str = ""
    tag: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    is_closed: bool = False


NO_MATCH, OPEN_MATCH = Match(REFUTED), Match(UNDECIDED)


def odd_names(
    names: Iterable[str], is_read: Callable[[str], bool], spelled: Callable[[str], str] = str
) -> Piece | None:
    """Return a piece for the names that a pattern does not read, longer ones first."""
    odd = sorted((name for name in names if not is_read(name)), key=len, reverse=True)
    return grouped("name", choice(*(fixed(spelled(name)) for name in odd))) if odd else None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text that contains a name, as models write it.

    Attributes:
        pieces: Its parts; the groups `name`, `kind`, `id` and `tag` and attributes are stored.
        name_key: The attribute that contains the name, if there are attributes.
        kind_key: The attribute that contains the type.
        own_keys: All attributes that the dialect writes.
        may_lack_name: Whether the name may be empty.
    """

    pieces: tuple[Piece, ...]
    name_key: str = ""
    kind_key: str = ""
    own_keys: tuple[str, ...] = ()
    may_lack_name: bool = False
    unescape: Callable[[str], str] = str
    _whole: re.Pattern[str] = field(init=False, repr=False)
    _begun: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        piece = sequence(*self.pieces)
        object.__setattr__(self, "_whole", re.compile(piece.whole))
        object.__setattr__(self, "_begun", re.compile(piece.begun))

    def match(self, text: str, position: int = 0) -> Match:
        """Match the text at a position."""
        limit = position + MAX_TAG_CHARS
        if found := self._whole.match(text, position, limit):
            return self._read(found)
        is_open = len(text) < limit and self._begun.fullmatch(text, position)
        return OPEN_MATCH if is_open else NO_MATCH

    def _read(self, found: re.Match[str]) -> Match:
        groups = found.groupdict(default="")
        attributes = attributes_in(groups.get("attributes", ""))
        name = attributes.get(self.name_key, "") if self.name_key else groups["name"].strip()
        if not (name := self.unescape(name)) and not self.may_lack_name:
            return NO_MATCH
        return Match(
            found.end(),
            name,
            attributes.get(self.kind_key) or groups.get("kind"),
            groups.get("id", ""),
            groups.get("tag", ""),
            {key: text for key, text in attributes.items() if key not in self.own_keys},
            bool(groups.get("closed")),
        )


def first_match(text: str, position: int, *patterns: Pattern | None) -> Match:
    """Return the match of the first pattern that does not refute the text."""
    found = NO_MATCH
    for pattern in patterns:
        if pattern and (found := pattern.match(text, position)).end != REFUTED:
            break
    return found
