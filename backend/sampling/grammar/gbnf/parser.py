"""Parses GBNF text to rules, by recursive descent."""

from backend.sampling.grammar.charset import ANY_CHARACTER, CharSet, Range
from backend.sampling.grammar.gbnf.ast import (
    Alternative,
    Atom,
    Item,
    Literal,
    Reference,
    Rule,
    TokenReference,
)
from backend.sampling.grammar.gbnf.lexer import Cursor

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
