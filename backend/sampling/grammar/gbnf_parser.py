"""A GBNF grammar as data.

It is flat: a group becomes a rule of its own, named after the rule that contains it. Nothing
nests, so code that walks a grammar uses loops, and no input can exhaust the stack.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from backend.errors import GrammarSyntaxError
from backend.sampling.grammar.vocabulary import ANY_CHARACTER, MAX_CODE_POINT, CharSet, Range


@dataclass(frozen=True, slots=True)
class Literal:
    """A text, character by character."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Text derived by another rule."""

    rule: str


@dataclass(frozen=True, slots=True)
class TokenReference:
    """One token, by id or by text in angle brackets; or any other token."""

    token: int | str
    is_negated: bool


Atom = Literal | CharSet | Reference | TokenReference


@dataclass(frozen=True, slots=True)
class Item:
    """An atom with a repeat count.

    Attributes:
        most: `None` means no limit.
        at: Offset in the grammar's text.
    """

    atom: Atom
    least: int = 1
    most: int | None = 1
    at: int = field(default=0, compare=False)


Alternative = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """The alternatives of a name.

    Attributes:
        is_group: Whether it was written as a group inside another rule.
        at: Offset in the grammar's text.
    """

    alternatives: tuple[Alternative, ...]
    is_group: bool = False
    at: int = field(default=0, compare=False)

    def items(self) -> Iterator[Item]:
        """Yield the items of all alternatives."""
        return chain.from_iterable(self.alternatives)

    def references(self) -> Iterator[tuple[str, Item]]:
        """Yield the names of referenced rules, each with the referring item."""
        for item in self.items():
            if isinstance(item.atom, Reference):
                yield item.atom.rule, item


Rules = Mapping[str, Rule]
ROOT = "root"


_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DIGITS = re.compile(r"[0-9]+")
_PLAIN_TEXT = re.compile(r'[^"\\]*')
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {c: c for c in '\\"[]-'}


class Cursor:
    """A reading position in a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, problem: str, at: int | None = None) -> GrammarSyntaxError:
        """Return an error for the character at `at`, or for the next one."""
        before = self.text[: self.at if at is None else at]
        breaks = list(_LINE_BREAK.finditer(before))
        line_start = breaks[-1].end() if breaks else 0
        return GrammarSyntaxError(len(breaks) + 1, len(before) - line_start + 1, problem)

    @property
    def next(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> bool:
        """Move past `expected` if it comes next; return whether it did."""
        found = self.text.startswith(expected, self.at)
        self.at += len(expected) if found else 0
        return found

    def require(self, expected: str) -> None:
        """Move past `expected`, which must come next."""
        if not self.take(expected):
            found = repr(self.next) if self.next else "the end"
            raise self.error(f"expected {expected!r}, found {found}")

    def skip_space(self, *, newlines: bool) -> None:
        """Move past blanks and comments, and past line breaks if `newlines` is set."""
        pattern = _SPACE_AND_LINES if newlines else _SPACE
        self._match(pattern)

    def starts_name(self) -> bool:
        """Whether a rule's name comes next."""
        return _NAME.match(self.text, self.at) is not None

    def name(self) -> str:
        """Read a rule's name."""
        return self._match(_NAME) or self._fail("expected the name of a rule")

    def integer(self) -> int:
        """Read a decimal number."""
        digits = self._match(_DIGITS) or self._fail("expected a number")
        # Longer numbers exceed every limit, and Python refuses very long ones.
        return int(digits.lstrip("0")[:20] or "0")

    def plain_text(self) -> str:
        """Read the characters of a literal up to an escape or the end."""
        return self._match(_PLAIN_TEXT)

    def character(self) -> int:
        r"""Read a character of a literal or a class; return its code point.

        A code point written as `\u` may be a surrogate, which never occurs in text.
        """
        if not self.next:
            self._fail("the grammar ends too early")
        if self.take("\\"):
            return self._escaped()
        self.at += 1
        return ord(self.text[self.at - 1])

    def _escaped(self) -> int:
        start, kind = self.at - 1, self.next
        self.at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _HEX_DIGITS:
            raise self.error(f"unknown escape {self.text[start : self.at]!r}", start)
        count = _HEX_DIGITS[kind]
        digits = re.compile(f"[0-9A-Fa-f]{{{count}}}").match(self.text, self.at)
        if digits is None:
            raise self.error(f"\\{kind} takes {count} hexadecimal digits", start)
        self.at = digits.end()
        value = int(digits.group(), 16)
        if value > MAX_CODE_POINT:
            raise self.error("there is no such character", start)
        return value

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        text = found.group() if found else ""
        self.at += len(text)
        return text

    def _fail(self, problem: str) -> str:
        raise self.error(problem)


# Far more than hosts write.
MAX_RULES = 10_000
MAX_NESTED_GROUPS = 100
MAX_COUNT = 100_000

_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_QUOTE_AND_BACKSLASH = CharSet.of([(ord('"'), ord('"')), (ord("\\"), ord("\\"))])
_CONTROL_CHARACTERS = CharSet.of([(0x00, 0x1F), (0x7F, 0x7F)])


def parse_gbnf(cursor: Cursor) -> dict[str, Rule]:
    """Return the rules by name; of rules with the same name, the last wins.

    Args:
        cursor: At the start of the grammar's text.

    Raises:
        GrammarSyntaxError: The text is not GBNF.
    """
    return _Parser(cursor).grammar()


class _Parser:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._rules: dict[str, Rule] = {}
        self._rule = ""
        self._depth = 0

    def grammar(self) -> dict[str, Rule]:
        self._cursor.skip_space(newlines=True)
        while self._cursor.next:
            self._definition()
        return self._rules

    def _definition(self) -> None:
        cursor, at = self._cursor, self._cursor.at
        self._rule = cursor.name()
        cursor.skip_space(newlines=False)
        cursor.require("::=")
        cursor.skip_space(newlines=True)
        self._add(self._rule, Rule(self._alternatives(is_nested=False), at=at))
        if cursor.next not in ("", "\r", "\n"):
            raise cursor.error(f"unexpected {cursor.next!r}: a rule ends with its line")
        cursor.skip_space(newlines=True)

    def _alternatives(self, *, is_nested: bool) -> tuple[Alternative, ...]:
        alternatives = [self._sequence(is_nested=is_nested)]
        while self._cursor.take("|"):
            self._cursor.skip_space(newlines=True)
            alternatives.append(self._sequence(is_nested=is_nested))
        return tuple(alternatives)

    def _sequence(self, *, is_nested: bool) -> Alternative:
        items: list[Item] = []
        while True:
            at = self._cursor.at
            if (atom := self._atom()) is not None:
                items.append(Item(atom, at=at))
            elif (count := self._count(is_nested=is_nested)) is not None:
                if not items:
                    raise self._cursor.error("there is nothing to repeat", at)
                items[-1] = self._repeated(items[-1], count)
            else:
                return tuple(items)
            self._cursor.skip_space(newlines=is_nested)

    def _atom(self) -> Atom | None:
        match self._cursor.next:
            case '"':
                return self._literal()
            case "[":
                return self._character_class()
            case "(":
                return self._group()
            case "<" | "!":
                return self._token()
            case ".":
                self._cursor.require(".")
                return ANY_CHARACTER
        return Reference(self._cursor.name()) if self._cursor.starts_name() else None

    def _literal(self) -> Literal:
        cursor, start = self._cursor, self._cursor.at
        cursor.require('"')
        text: list[str] = []
        while not cursor.take('"'):
            text.append(cursor.plain_text())
            at = cursor.at
            if not cursor.next:
                raise cursor.error("this literal has no end", start)
            if cursor.next == "\\":
                text.append(chr(cursor.character()))
                if text[-1] not in ANY_CHARACTER:
                    raise cursor.error("a surrogate is not a character: write the whole one", at)
        return Literal("".join(text))

    def _character_class(self) -> CharSet:
        cursor, start = self._cursor, self._cursor.at
        cursor.require("[")
        is_negated = cursor.take("^")
        ranges: list[Range] = []
        while not cursor.take("]"):
            if not cursor.next:
                raise cursor.error("this character class has no end", start)
            ranges.append(self._range(start))
        if not ranges:
            raise cursor.error("this character class is empty", start)
        listed = CharSet.of(ranges)
        return ~_with_control_characters(listed) if is_negated else listed

    def _range(self, start: int) -> Range:
        cursor, at = self._cursor, self._cursor.at
        low = high = cursor.character()
        if cursor.next == "-" and cursor.text[cursor.at + 1 : cursor.at + 2] != "]":
            cursor.require("-")
            if not cursor.next:
                raise cursor.error("this character class has no end", start)
            high = cursor.character()
        if high < low:
            raise cursor.error("this range ends before it starts", at)
        return low, high

    def _group(self) -> Reference:
        cursor, start = self._cursor, self._cursor.at
        self._depth += 1
        if self._depth > MAX_NESTED_GROUPS:
            raise cursor.error(f"groups nest more than {MAX_NESTED_GROUPS} deep")
        cursor.require("(")
        cursor.skip_space(newlines=True)
        alternatives = self._alternatives(is_nested=True)
        if not cursor.next:
            raise cursor.error("this group has no end", start)
        cursor.require(")")
        self._depth -= 1
        return self._add_group(alternatives, start)

    def _add_group(self, alternatives: tuple[Alternative, ...], at: int) -> Reference:
        # Names in a grammar's text cannot contain a "#".
        name = f"{self._rule}#{len(self._rules)}"
        self._add(name, Rule(alternatives, is_group=True, at=at))
        return Reference(name)

    def _add(self, name: str, rule: Rule) -> None:
        self._rules[name] = rule
        if len(self._rules) > MAX_RULES:
            raise self._cursor.error(f"there are more than {MAX_RULES} rules and groups", rule.at)

    def _token(self) -> TokenReference:
        cursor = self._cursor
        is_negated = cursor.take("!")
        at = cursor.at
        cursor.require("<")
        if cursor.take("["):
            token_id = cursor.integer()
            cursor.require("]>")
            return TokenReference(token_id, is_negated)
        end = cursor.text.find(">", at)
        if end < 0:
            raise cursor.error("this token has no end", at)
        cursor.at = end + 1
        return TokenReference(cursor.text[at : cursor.at], is_negated)

    def _count(self, *, is_nested: bool) -> tuple[int, int | None] | None:
        """Read a repetition operator; return its minimum and maximum."""
        cursor, at = self._cursor, self._cursor.at
        if cursor.next and cursor.next in _COUNTS:
            cursor.at += 1
            return _COUNTS[cursor.text[at]]
        if not cursor.take("{"):
            return None
        cursor.skip_space(newlines=is_nested)
        least = cursor.integer()
        most: int | None = least
        cursor.skip_space(newlines=is_nested)
        if cursor.take(","):
            cursor.skip_space(newlines=is_nested)
            most = cursor.integer() if cursor.next.isdecimal() else None
            cursor.skip_space(newlines=is_nested)
        cursor.require("}")
        if most is not None and most < least:
            raise cursor.error("the greatest count is below the least", at)
        if max(least, most or 0) > MAX_COUNT:
            raise cursor.error(f"a count is over {MAX_COUNT}", at)
        return least, most

    def _repeated(self, item: Item, count: tuple[int, int | None]) -> Item:
        if (item.least, item.most) == (1, 1):
            return Item(item.atom, *count, at=item.at)
        return Item(self._add_group(((item,),), item.at), *count, at=item.at)


def _with_control_characters(excluded: CharSet) -> CharSet:
    r"""Exclude control characters too if the class is the inside of a JSON string.

    Hosts write it as `[^"\\]`, which would allow raw line breaks in strings.
    """
    is_json_string = excluded & _QUOTE_AND_BACKSLASH == _QUOTE_AND_BACKSLASH
    return excluded | _CONTROL_CHARACTERS if is_json_string else excluded
