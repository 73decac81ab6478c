"""Rules of GBNF as a graph: those that derive text, and the same language with less of a stack."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from backend.errors import GrammarError
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
)
from backend.sampling.grammar.vocabulary import ANY_CHARACTER, CharSet, Vocabulary


def _derivable(rules: Rules, holds: Callable[[Atom], bool]) -> set[str]:
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
    return _derivable(rules, lambda atom: atom == Literal(""))


def may_be_empty(item: Item, nullable: set[str]) -> bool:
    """Return whether the item derives empty text, given the nullable rules."""
    match item.atom:
        case Reference(name):
            return not item.least or name in nullable
        case Literal(text):
            return not item.least or not text
        case _:
            return not item.least


Edges = Mapping[str, Collection[str]]


def components(edges: Edges) -> list[list[str]]:
    """Return the strongly connected components, each after its successors.

    Kosaraju's algorithm, as in Aho, Hopcroft, Ullman: Data Structures and Algorithms (1983).

    Args:
        edges: Successors of every node, which are nodes too.
    """
    seen: set[str] = set()
    finished = [node for start in edges for node in _visited(start, edges, seen)]
    sources: dict[str, list[str]] = {node: [] for node in edges}
    for node, targets in edges.items():
        for target in targets:
            sources[target].append(node)
    seen.clear()
    found = [list(_visited(start, sources, seen)) for start in reversed(finished)]
    return [component for component in reversed(found) if component]


def reachable(starts: Iterable[str], edges: Edges) -> set[str]:
    """Return the nodes reachable from `starts`, including these."""
    seen: set[str] = set()
    return {node for start in starts for node in _visited(start, edges, seen)}


def is_cycle(component: Collection[str], edges: Edges) -> bool:
    """Return whether a component contains a cycle."""
    return len(component) > 1 or any(node in edges[node] for node in component)


def longest_chain(edges: Edges, weights: Mapping[str, int]) -> int:
    """Return the greatest weight of a path; a cycle counts with the weight of all its nodes."""
    heaviest: dict[str, int] = {}
    for component in components(edges):
        beyond = {target for node in component for target in edges[node]} - set(component)
        weight = sum(weights[node] for node in component)
        total = weight + max((heaviest[target] for target in beyond), default=0)
        heaviest.update(dict.fromkeys(component, total))
    return max(heaviest.values(), default=0)


def _visited(start: str, edges: Edges, seen: set[str]) -> Iterator[str]:
    """Walk depth first over nodes not in `seen`; yield each node after its successors."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(edges[start]))]
    while path:
        node, targets = path[-1]
        target = next((target for target in targets if target not in seen), None)
        if target is None:
            path.pop()
            yield node
        else:
            seen.add(target)
            path.append((target, iter(edges[target])))


SPELLED = f"{ROOT}#spelled"


def with_leading_markers(rules: Rules, markers: Mapping[str, int]) -> dict[str, Rule]:
    """Return rules that also allow a marker's token where a reply begins with its text.

    Hosts write prefixes such as "<tool_call>" as text. A model would have to spell them out, which
    it never learned: terminals are made of characters, and marker tokens are not characters.
    """
    starts = rules[ROOT].alternatives
    match starts:
        case ((Item(Reference(name), 1, 1),),) if rules[name].is_group:
            starts = rules[name].alternatives
    marked = [_marked(alternative, markers) for alternative in starts]
    alternatives = tuple(alternative for alternative in marked if alternative)
    if not alternatives:
        return dict(rules)
    root = Rule(((Item(Reference(SPELLED)),), *alternatives))
    return {**rules, ROOT: root, SPELLED: rules[ROOT]}


def _marked(alternative: Alternative, markers: Mapping[str, int]) -> Alternative:
    """Return the alternative with a token at its start, or `None` if it starts differently."""
    match alternative:
        case (Item(Literal(text), 1, 1), *rest):
            marker = max(filter(text.startswith, filter(None, markers)), key=len, default="")
            if marker:
                token = Item(TokenReference(markers[marker], is_negated=False))
                return token, Item(Literal(text.removeprefix(marker))), *rest
    return ()


# The items before a group are duplicated for each of its alternatives.
_MAX_WRITTEN_ITEMS = 10_000


def prune(rules: Rules, characters: CharSet) -> dict[str, Rule]:
    """Return the rules that the root derives with these characters.

    Every partial reply can then be completed.

    Raises:
        GrammarError: Nothing can be derived.
    """
    derived = _derivable(rules, lambda atom: _is_writable(atom, characters))
    if ROOT not in derived:
        if ROOT in _derivable(rules, lambda atom: _is_writable(atom, ANY_CHARACTER)):
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
        has_tokens = any(isinstance(item.atom, TokenReference) for item in rules[name].items())
        if is_cycle(component, edges) or has_tokens:
            continue
        if regular.issuperset(edges[name]):
            regular.add(name)
    return frozenset(regular)


def _edges(rules: Rules) -> Mapping[str, list[str]]:
    return {name: [target for target, _ in rule.references()] for name, rule in rules.items()}


def _connected(rules: Rules) -> dict[str, Rule]:
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


MAX_CHAIN = 500
MAX_LEVELS = 2000
MAX_EXPANDED_CHARACTERS = 1 << 17
# A row of optional items costs its length squared.
MAX_OPTIONAL_COST = 1_000_000


def require_defined(rules: Rules, cursor: Cursor) -> None:
    """Refuse a grammar without a root, or with an undefined name.

    Raises:
        GrammarError: It is incomplete; the message says where.
    """
    named = ((item.at, name) for rule in rules.values() for name, item in rule.references())
    if missing := [(at, name) for at, name in named if name not in rules]:
        at, name = min(missing)
        raise cursor.error(f"there is no rule {name!r}", at)
    if ROOT not in rules:
        raise GrammarError(f"there is no rule {ROOT!r}")


def require_tokens(rules: Rules, cursor: Cursor, vocabulary: Vocabulary) -> None:
    """Refuse references to tokens outside the vocabulary.

    Raises:
        GrammarSyntaxError: There is one; the message says where.
    """
    for item in (item for rule in rules.values() for item in rule.items()):
        token = item.atom
        if isinstance(token, TokenReference) and vocabulary.token_id(token.token) is None:
            raise cursor.error(f"{token.token} is not a token of this model", item.at)


def require_finite(rules: Rules, cursor: Cursor) -> None:
    """Refuse left recursion and endless repetition of empty text.

    Raises:
        GrammarSyntaxError: There is one of these; the message says where.
    """
    nullable = nullable_rules(rules)
    corners = {name: _left_corners(rules[name].alternatives, nullable) for name in rules}
    for component in components(corners):
        if is_cycle(component, corners):
            at, name = min((rules[name].at, name) for name in component)
            raise cursor.error(f"rule {_written(name)!r} is left-recursive", at)
    for rule in rules.values():
        for name, item in rule.references():
            if item.most is None and name in nullable:
                raise cursor.error("endless repetition of something that may be empty", item.at)


def require_bounded(rules: Rules) -> None:
    """Refuse a grammar that would crash llguidance or keep it busy for long.

    Raises:
        GrammarError: The grammar is too large in some respect.
    """
    edges = _edges(rules)
    if longest_chain(edges, {name: not rule.is_group for name, rule in rules.items()}) > MAX_CHAIN:
        raise GrammarError(f"rules refer to rules more than {MAX_CHAIN} deep")
    if longest_chain(edges, dict.fromkeys(rules, 1)) > MAX_LEVELS:
        raise GrammarError(f"rules and groups nest more than {MAX_LEVELS} deep")
    lengths = _expanded_lengths(rules, edges)
    if sum(lengths.values()) > MAX_EXPANDED_CHARACTERS:
        raise GrammarError(f"spells out more than {MAX_EXPANDED_CHARACTERS} characters in a row")
    if _optional_cost(rules, lengths) > MAX_OPTIONAL_COST:
        raise GrammarError("has too many optional items in a row")


def _left_corners(alternatives: tuple[Alternative, ...], nullable: set[str]) -> set[str]:
    """Return the rules that may come first in a text."""
    corners: set[str] = set()
    for alternative in alternatives:
        for item in alternative:
            if isinstance(item.atom, Reference):
                corners.add(item.atom.rule)
            if not may_be_empty(item, nullable):
                break
    return corners


def _expanded_lengths(rules: Rules, edges: Mapping[str, list[str]]) -> dict[str, int]:
    """Return the length of each rule's text, in characters, with nested sequences expanded.

    llguidance joins sequences, so in a chain of rules that each use the next one twice the text
    doubles at every step. Alternatives and repetitions prevent that.
    """
    lengths: dict[str, int] = {}
    for component in components(edges):
        for name in component:
            match rules[name].alternatives:
                case [sequence]:
                    lengths[name] = sum(_expanded_length(item, lengths) for item in sequence)
                case alternatives:
                    lengths[name] = len(alternatives)
            lengths[name] = min(lengths[name], MAX_EXPANDED_CHARACTERS + 1)
    return lengths


def _expanded_length(item: Item, lengths: Mapping[str, int]) -> int:
    match item.atom:
        case Literal(text):
            return len(text)
        case Reference(name) if (item.least, item.most) == (1, 1):
            return lengths.get(name, 1)
        case _:
            return 1


def _optional_cost(rules: Rules, lengths: Mapping[str, int]) -> int:
    nullable = nullable_rules(rules)
    cost = 0
    for rule in rules.values():
        for alternative in rule.alternatives:
            for is_row, row in groupby(alternative, lambda item: may_be_empty(item, nullable)):
                cost += is_row * sum(_expanded_length(item, lengths) for item in row) ** 2
    return cost


def _written(name: str) -> str:
    """Return the name of the rule that contains a group."""
    return name.partition("#")[0]
