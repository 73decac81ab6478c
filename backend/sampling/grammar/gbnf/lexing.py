"""Decides when a recursive grammar can be split into terminals.

llguidance matches the longest terminal and never backtracks. That is exact if no character
that may follow a terminal could also extend it, or turn it into another one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from backend.sampling.grammar.charset import CharSet
from backend.sampling.grammar.gbnf.ast import (
    Alternative,
    Atom,
    Item,
    Literal,
    Reference,
    Rules,
    TokenReference,
)
from backend.sampling.grammar.gbnf.derive import may_be_empty, nullable_rules
from backend.sampling.grammar.gbnf.nfa import CharacterClasses, Nfa, OverBudgetError

_MAX_PASSES = 40
_MAX_ITEMS = 5000

Place = Item | str
_Key = TypeVar("_Key")


def terminals(rules: Rules, regular: Collection[str]) -> frozenset[Item]:
    """Return the items of irregular rules that are themselves regular."""
    return frozenset(
        item
        for name, rule in rules.items()
        if name not in regular
        for alternative in rule.alternatives
        for item in alternative
        if _is_regular(item.atom, regular)
    )


def cuts_are_certain(rules: Rules, irregular: Collection[str], pieces: Collection[Item]) -> bool:
    """Return whether the longest match of `pieces` is provably right wherever they meet.

    A grammar that is too large counts as uncertain.

    Args:
        rules: All rules.
        irregular: Rules made of pieces and of one another.
        pieces: The terminals.
    """
    items = sum(len(alternative) for rule in rules.values() for alternative in rule.alternatives)
    if items > _MAX_ITEMS:
        return False
    try:
        classes = CharacterClasses(_sets(rules))
        after = _Neighbours(rules, classes).after(pieces, irregular)
        automaton = Nfa(rules, classes)
        for piece in pieces:
            automaton.add(piece)
        return all(
            not onward & after[piece] for ends, onward in automaton.states() for piece in ends
        )
    except OverBudgetError:
        return False


class _Neighbours:
    """Tells which classes of characters may begin an item, and which may follow it."""

    def __init__(self, rules: Rules, classes: CharacterClasses) -> None:
        self._rules = rules
        self._classes = classes
        self._nullable = nullable_rules(rules)
        self._first = _settled(dict.fromkeys(rules, 0), self._grow_first)

    def after(self, pieces: Collection[Item], irregular: Collection[str]) -> dict[Place, int]:
        """Return the characters that may follow each piece and each irregular rule."""

        def grow(after: dict[Place, int]) -> None:
            for name in irregular:
                for alternative in self._rules[name].alternatives:
                    self._grow_after(after, name, alternative, pieces)

        return _settled(dict.fromkeys([*pieces, *irregular], 0), grow)

    def _grow_first(self, first: dict[str, int]) -> None:
        for name, rule in self._rules.items():
            for alternative in rule.alternatives:
                for item in alternative:
                    first[name] |= self._first_of(item, first)
                    if not may_be_empty(item, self._nullable):
                        break

    def _grow_after(
        self,
        after: dict[Place, int],
        name: str,
        alternative: Alternative,
        pieces: Collection[Item],
    ) -> None:
        onward = after[name]
        for item in reversed(alternative):
            first = self._first_of(item, self._first)
            if item in pieces:
                after[item] |= onward
            elif isinstance(item.atom, Reference) and item.atom.rule in after:
                after[item.atom.rule] |= onward if item.most == 1 else onward | first
            onward = onward | first if may_be_empty(item, self._nullable) else first

    def _first_of(self, item: Item, first: Mapping[str, int]) -> int:
        match item.atom:
            case Literal(text):
                return self._classes.mask(CharSet.single(text[0])) if text else 0
            case CharSet():
                return self._classes.mask(item.atom)
            case Reference(name):
                return first[name]
            case TokenReference():  # not a character: it ends the text before it
                return 0


def _settled(masks: dict[_Key, int], grow: Callable[[dict[_Key, int]], None]) -> dict[_Key, int]:
    """Grow masks until they no longer change."""
    for _ in range(_MAX_PASSES):
        before = dict(masks)
        grow(masks)
        if masks == before:
            return masks
    raise OverBudgetError


def _sets(rules: Rules) -> Iterator[CharSet]:
    for rule in rules.values():
        for alternative in rule.alternatives:
            for item in alternative:
                if isinstance(item.atom, CharSet):
                    yield item.atom
                elif isinstance(item.atom, Literal):
                    yield from map(CharSet.single, item.atom.text)


def _is_regular(atom: Atom, regular: Collection[str]) -> bool:
    match atom:
        case Reference(name):
            return name in regular
        case TokenReference():
            return False
        case _:
            return True
