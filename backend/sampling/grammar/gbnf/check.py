"""Checks that a grammar is complete, finite to expand, and not too large.

llguidance crashes on deep chains of references, and takes seconds for texts that double or for
long rows of optional items; see `longest_chain`, `_expanded_lengths` and `_optional_cost`.
"""

from collections.abc import Mapping
from itertools import groupby

from backend.errors import GrammarError
from backend.sampling.grammar.gbnf.ast import (
    ROOT,
    Alternative,
    Item,
    Literal,
    Reference,
    Rules,
    TokenReference,
)
from backend.sampling.grammar.gbnf.derive import may_be_empty, nullable_rules
from backend.sampling.grammar.gbnf.graph import components, is_cycle, longest_chain
from backend.sampling.grammar.gbnf.lexer import Cursor
from backend.sampling.grammar.vocabulary import Vocabulary

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
    for rule in rules.values():
        for alternative in rule.alternatives:
            for item in alternative:
                if not isinstance(item.atom, TokenReference):
                    continue
                if vocabulary.token_id(item.atom.token) is None:
                    raise cursor.error(f"{item.atom.token} is not a token of this model", item.at)


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
    edges = {name: [target for target, _ in rule.references()] for name, rule in rules.items()}
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
    """Return the sum of the squared lengths of rows of optional items."""
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
