"""Replies that begin with a marker, either as a single token or spelled out."""

from collections.abc import Mapping

from backend.sampling.grammar.gbnf.ast import (
    ROOT,
    Alternative,
    Item,
    Literal,
    Reference,
    Rule,
    Rules,
    TokenReference,
)

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
