"""Translates GBNF text to a grammar for llguidance.

A grammar without recursion becomes one terminal, which is exact: nothing is split. A recursive
grammar is split into terminals where that is provably exact, and otherwise into characters,
which is always exact but costs milliseconds per token.
"""

from collections.abc import Iterator

from backend.sampling.grammar.charset import CharSet
from backend.sampling.grammar.gbnf.ast import (
    ROOT,
    Alternative,
    Item,
    Literal,
    Reference,
    Rule,
    Rules,
)
from backend.sampling.grammar.gbnf.check import (
    require_bounded,
    require_defined,
    require_finite,
    require_tokens,
)
from backend.sampling.grammar.gbnf.lark_writer import write_lark
from backend.sampling.grammar.gbnf.lexer import Cursor
from backend.sampling.grammar.gbnf.lexing import cuts_are_certain, terminals
from backend.sampling.grammar.gbnf.markers import SPELLED, with_leading_markers
from backend.sampling.grammar.gbnf.parser import parse_gbnf
from backend.sampling.grammar.gbnf.reduce import prune, regular_rules, unroll
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.vocabulary import Vocabulary


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
