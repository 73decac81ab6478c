"""Writes GBNF rules in llguidance's variant of Lark.

A definition contains no parentheses: a group becomes a definition of its own. Names are
numbered in the order in which they are reached from the root, so grammars that differ only in
rule names or rule order produce the same text.
"""

import json
from collections import deque
from collections.abc import Collection

from backend.sampling.grammar.charset import CharSet
from backend.sampling.grammar.gbnf.ast import (
    ROOT,
    Atom,
    Item,
    Literal,
    Reference,
    Rules,
    TokenReference,
)
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.vocabulary import Vocabulary

_PRINTABLE = CharSet.of([(0x20, 0x7E)])


def write_lark(rules: Rules, terminals: Collection[Item], vocabulary: Vocabulary) -> LarkGrammar:
    """Return the grammar of the root rule.

    Args:
        rules: All rules that the root needs.
        terminals: Items that the lexer reads in one piece, with everything that they refer to;
            they contain neither recursion nor tokens. The parser handles the rest.
        vocabulary: Maps tokens to ids.
    """
    writer = _Writer(rules, terminals, vocabulary)
    start = writer.phrase(Item(Reference(ROOT)))
    return LarkGrammar(start, tuple(writer.definitions()))


class _Writer:
    """Writes definitions, followed by those that they refer to.

    The parser reads phrases, named r1, r2, ...; the lexer reads terminals, T1, T2, ...
    """

    def __init__(self, rules: Rules, terminals: Collection[Item], vocabulary: Vocabulary) -> None:
        self._rules = rules
        self._terminals = frozenset(terminals)
        self._vocabulary = vocabulary
        self._names: dict[tuple[str, str | Item], str] = {}
        self._pending: deque[tuple[str, str | Item]] = deque()

    def definitions(self) -> list[str]:
        lines = []
        while self._pending:
            kind, defined = key = self._pending.popleft()
            if isinstance(defined, Item):
                body = self._terminal(defined)
            else:
                write = self.phrase if kind == "r" else self._terminal
                alternatives = self._rules[defined].alternatives
                body = " | ".join(" ".join(map(write, items)) or '""' for items in alternatives)
            lines.append(f"{self._names[key]}: {body}")
        return lines

    def phrase(self, item: Item) -> str:
        if item not in self._terminals:
            return self._atom("r", item.atom) + _count(item)
        if (item.least, item.most) == (1, 1):
            return self._atom("T", item.atom)
        return self._name("T", item)

    def _terminal(self, item: Item) -> str:
        return self._atom("T", item.atom) + _count(item)

    def _atom(self, kind: str, atom: Atom) -> str:
        match atom:
            case Literal(text):
                return _quoted(text)
            case CharSet(ranges):
                return "/[" + "".join(f"{_escaped(a)}-{_escaped(b)}" for a, b in ranges) + "]/"
            case Reference(name):
                return self._name(kind, name)
            case TokenReference():
                return self._token(atom)

    def _token(self, reference: TokenReference) -> str:
        token_id = self._vocabulary.token_id(reference.token)
        if not reference.is_negated:
            return f"<[{token_id}]>"
        return f"<[^{','.join(map(str, [token_id, *self._vocabulary.eos_ids]))}]>"

    def _name(self, kind: str, defined: str | Item) -> str:
        key = kind, defined
        if key not in self._names:
            self._names[key] = f"{kind}{len(self._names)}"
            self._pending.append(key)
        return self._names[key]


def _quoted(text: str) -> str:
    if all(character in _PRINTABLE for character in text):
        return json.dumps(text)
    return "/" + "".join(_escaped(ord(character)) for character in text) + "/"


def _escaped(code_point: int) -> str:
    return f"\\x{{{code_point:X}}}"


def _count(item: Item) -> str:
    match item.least, item.most:
        case 1, 1:
            return ""
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case least, None:
            return f"{{{least},}}"
        case least, most:
            return f"{{{least},{most}}}"
