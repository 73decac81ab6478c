"""Writes GBNF rules in llguidance's variant of Lark.

A definition contains no parentheses: a group becomes a definition of its own. Names are
numbered in the order in which they are reached from the root, so grammars that differ only in
rule names or rule order produce the same text.
"""

import json
from collections import deque
from collections.abc import Collection, Iterator

from backend.sampling.grammar.gbnf_parser import (
    ROOT,
    Alternative,
    Atom,
    Cursor,
    Item,
    Literal,
    Reference,
    Rule,
    Rules,
    TokenReference,
    parse_gbnf,
)
from backend.sampling.grammar.gbnf_rules import (
    SPELLED,
    prune,
    regular_rules,
    require_bounded,
    require_defined,
    require_finite,
    require_tokens,
    unroll,
    with_leading_markers,
)
from backend.sampling.grammar.gbnf_terminals import cuts_are_certain, terminals
from backend.sampling.grammar.vocabulary import CharSet, Vocabulary
from backend.sampling.grammar.writer import LarkGrammar

_PRINTABLE = CharSet.of([(0x20, 0x7E)])


def write_lark(rules: Rules, terminals: Collection[Item], vocabulary: Vocabulary) -> LarkGrammar:
    """Return the grammar of the root rule.

    Args:
        terminals: Items that the lexer reads in one piece, with everything that they refer to;
            they contain neither recursion nor tokens. The parser handles the rest.
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


def gbnf_to_lark(text: str, vocabulary: Vocabulary) -> LarkGrammar:
    """Translate a grammar, with tokens of this model.

    Raises:
        GrammarError: The text is not a grammar, or cannot be enforced.
    """
    cursor = Cursor(text)
    rules = parse_gbnf(cursor)
    require_defined(rules, cursor)
    require_tokens(rules, cursor, vocabulary)
    require_finite(rules, cursor)
    needed = prune(rules, vocabulary.characters)
    require_bounded(needed)
    plain = unroll(needed)
    for candidate in (with_leading_markers(plain, vocabulary.markers), plain):
        if (pieces := _certain_pieces(candidate)) is not None:
            return write_lark(candidate, pieces, vocabulary)
    return write_lark(_spelled(plain), (), vocabulary)


def _certain_pieces(rules: Rules) -> frozenset[Item] | None:
    """Return terminals that the grammar can be split into, or `None` if that is not certain."""
    regular = regular_rules(rules)
    if ROOT in regular:
        return frozenset({Item(Reference(ROOT))})
    pieces = terminals(rules, regular)
    # The spelled root meets no other piece: its alternatives begin with a token.
    meeting = pieces - {Item(Reference(SPELLED))}
    return pieces if cuts_are_certain(rules, rules.keys() - regular, meeting) else None


def _spelled(rules: Rules) -> dict[str, Rule]:
    """Return the rules with every literal as a sequence of its characters."""
    spelled: dict[str, Rule] = {}
    for name, rule in rules.items():
        alternatives = [tuple(_letters(alternative, spelled)) for alternative in rule.alternatives]
        spelled[name] = Rule(tuple(alternatives), rule.is_group)
    return spelled


def _letters(alternative: Alternative, groups: dict[str, Rule]) -> Iterator[Item]:
    for item in alternative:
        if not isinstance(item.atom, Literal):
            yield item
            continue
        letters = tuple(Item(CharSet.single(character)) for character in item.atom.text)
        if (item.least, item.most) == (1, 1):
            yield from letters
        else:
            name = f"#{item.atom.text}"
            groups[name] = Rule((letters,), is_group=True)
            yield Item(Reference(name), item.least, item.most)
