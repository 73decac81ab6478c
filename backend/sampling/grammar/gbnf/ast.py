"""A GBNF grammar as data.

The form is flat: a group is a rule of its own, named after the rule that holds it. Nothing nests,
so whatever walks a grammar is a loop, and no text can make it run out of stack.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from backend.sampling.grammar.charset import CharSet


@dataclass(frozen=True, slots=True)
class Literal:
    """A text, character by character."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Whatever a rule derives."""

    rule: str


@dataclass(frozen=True, slots=True)
class TokenReference:
    """One token, by its id or by its text in angle brackets; or any other token."""

    token: int | str
    is_negated: bool


Atom = Literal | CharSet | Reference | TokenReference


@dataclass(frozen=True, slots=True)
class Item:
    """An atom with a count.

    Attributes:
        most: `None` is without end.
        at: Where it stands in the grammar's text.
    """

    atom: Atom
    least: int = 1
    most: int | None = 1
    at: int = field(default=0, compare=False)


Alternative = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """The derivations of a name.

    Attributes:
        is_group: Whether it was written as a group inside another rule.
        at: Where it stands in the grammar's text.
    """

    alternatives: tuple[Alternative, ...]
    is_group: bool = False
    at: int = field(default=0, compare=False)

    def references(self) -> Iterator[tuple[str, Item]]:
        """Yield the rules that are referred to, with the items that do so."""
        for alternative in self.alternatives:
            for item in alternative:
                if isinstance(item.atom, Reference):
                    yield item.atom.rule, item


Rules = Mapping[str, Rule]
ROOT = "root"
