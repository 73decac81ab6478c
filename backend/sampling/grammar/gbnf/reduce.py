"""Simplifies rules: drops underivable parts, and turns tail recursion into repetition."""

from collections.abc import Mapping
from dataclasses import replace

from backend.errors import GrammarError
from backend.sampling.grammar.charset import ANY_CHARACTER, CharSet
from backend.sampling.grammar.gbnf.ast import (
    ROOT,
    Alternative,
    Atom,
    Item,
    Literal,
    Reference,
    Rule,
    Rules,
    TokenReference,
)
from backend.sampling.grammar.gbnf.derive import derivable
from backend.sampling.grammar.gbnf.graph import components, is_cycle, reachable

# The items before a group are duplicated for each of its alternatives.
_MAX_WRITTEN_ITEMS = 10_000


def prune(rules: Rules, characters: CharSet) -> dict[str, Rule]:
    """Return the rules that the root derives with these characters.

    Every partial reply can then be completed.

    Raises:
        GrammarError: Nothing can be derived.
    """
    derived = derivable(rules, lambda atom: _is_writable(atom, characters))
    if ROOT not in derived:
        if ROOT in derivable(rules, lambda atom: _is_writable(atom, ANY_CHARACTER)):
            raise GrammarError("the model's vocabulary cannot express it")
        raise GrammarError("no text can complete it")
    kept: dict[str, Rule] = {}
    for name, rule in rules.items():
        pruned = (_pruned(alternative, derived, characters) for alternative in rule.alternatives)
        remaining = tuple(alternative for alternative in pruned if alternative is not None)
        kept[name] = replace(rule, alternatives=remaining)
    return _connected(kept)


def unroll(rules: Rules) -> dict[str, Rule]:
    """Return the rules with direct right recursion, `x ::= a x | b`, as repetition, `a* b`."""
    unrolled = dict(rules)
    edges = _edges(rules)
    for component in components(edges):
        written = [name for name in component if not rules[name].is_group]
        if is_cycle(component, edges) and len(written) == 1:
            unrolled.update(_as_repetition(written[0], rules, frozenset(component)))
    return _connected(unrolled)


def regular_rules(rules: Rules) -> frozenset[str]:
    """Return the rules that need no stack: no recursion, direct or indirect.

    References to tokens count as irregular: a lexer sees only characters.
    """
    edges = _edges(rules)
    regular: set[str] = set()
    for component in components(edges):
        (name, *_) = component
        if is_cycle(component, edges) or _refers_to_tokens(rules[name]):
            continue
        if regular.issuperset(edges[name]):
            regular.add(name)
    return frozenset(regular)


def _edges(rules: Rules) -> Mapping[str, list[str]]:
    return {name: [target for target, _ in rule.references()] for name, rule in rules.items()}


def _connected(rules: Rules) -> dict[str, Rule]:
    """Return the rules that the root needs."""
    needed = reachable([ROOT], _edges(rules))
    return {name: rule for name, rule in rules.items() if name in needed}


def _is_writable(atom: Atom, characters: CharSet) -> bool:
    match atom:
        case Literal(text):
            return characters == ANY_CHARACTER or all(map(characters.__contains__, text))
        case CharSet():
            return bool(atom & characters)
        case _:
            return True


def _pruned(alternative: Alternative, derived: set[str], characters: CharSet) -> Alternative | None:
    """Return the alternative without underivable items, or `None` if it cannot be derived."""
    kept: list[Item] = []
    for item in alternative:
        atom = item.atom & characters if isinstance(item.atom, CharSet) else item.atom
        is_derived = (
            atom.rule in derived if isinstance(atom, Reference) else _is_writable(atom, characters)
        )
        if is_derived and item.most != 0:
            kept.append(replace(item, atom=atom))
        elif item.least:
            return None
    return tuple(kept)


def _as_repetition(name: str, rules: Rules, cycle: frozenset[str]) -> dict[str, Rule]:
    """Return new rules for one that refers to itself only at its end; empty for any other."""
    loops: list[Alternative] = []
    exits: list[Alternative] = []
    written = 0
    pending = list(reversed(rules[name].alternatives))
    while pending:
        alternative = pending.pop()
        written += len(alternative)
        if written > _MAX_WRITTEN_ITEMS:
            return {}
        recurring = [item for item in alternative if _refers_to(item, cycle)]
        if not recurring:
            exits.append(alternative)
            continue
        *front, last = alternative
        if recurring != [last] or last.most != 1 or not isinstance(last.atom, Reference):
            return {}
        if last.least == 0:
            exits.append(tuple(front))
        target = last.atom.rule
        if target == name:
            loops.append(tuple(front))
        else:  # a group at the end, ending with the reference
            pending.extend((*front, *inner) for inner in reversed(rules[target].alternatives))
    body = f"{name}#loop"
    repetition = Item(Reference(body), 0, None)
    return {
        name: Rule(tuple((repetition, *ending) for ending in exits), at=rules[name].at),
        body: Rule(tuple(loops), is_group=True),
    }


def _refers_to(item: Item, names: frozenset[str]) -> bool:
    return isinstance(item.atom, Reference) and item.atom.rule in names


def _refers_to_tokens(rule: Rule) -> bool:
    return any(
        isinstance(item.atom, TokenReference)
        for alternative in rule.alternatives
        for item in alternative
    )
