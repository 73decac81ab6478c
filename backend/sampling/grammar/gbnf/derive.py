"""Finds the rules that derive any text at all."""

from collections import defaultdict
from collections.abc import Callable

from backend.sampling.grammar.gbnf.ast import Atom, Item, Literal, Reference, Rules


def derivable(rules: Rules, holds: Callable[[Atom], bool]) -> set[str]:
    """Return the rules that derive a text made only of atoms for which `holds` is true.

    Optional items are taken as absent. Each reference is visited once.
    """
    waiting: defaultdict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    found: set[str] = set()
    ready: list[str] = []
    for name, rule in rules.items():
        for alternative in rule.alternatives:
            atoms = [item.atom for item in alternative if item.least]
            needs = {atom.rule for atom in atoms if isinstance(atom, Reference)}
            if not all(isinstance(atom, Reference) or holds(atom) for atom in atoms):
                continue
            for need in needs:
                waiting[need].append((name, needs))
            if not needs:
                ready.append(name)
    while ready:
        name = ready.pop()
        if name in found:
            continue
        found.add(name)
        for user, needs in waiting[name]:
            needs.discard(name)
            if not needs:
                ready.append(user)
    return found


def nullable_rules(rules: Rules) -> set[str]:
    """Return the rules that derive empty text."""
    return derivable(rules, lambda atom: atom == Literal(""))


def may_be_empty(item: Item, nullable: set[str]) -> bool:
    """Return whether the item derives empty text, given the nullable rules."""
    match item.atom:
        case Reference(name):
            return not item.least or name in nullable
        case Literal(text):
            return not item.least or not text
        case _:
            return not item.least
