"""A GBNF grammar as data.

It is flat: a group becomes a rule of its own, named after the rule that contains it. Nothing
nests, so code that walks a grammar uses loops, and no input can exhaust the stack.
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
    """Text derived by another rule."""

    rule: str


@dataclass(frozen=True, slots=True)
class TokenReference:
    """One token, by id or by text in angle brackets; or any other token."""

    token: int | str
    is_negated: bool


Atom = Literal | CharSet | Reference | TokenReference


@dataclass(frozen=True, slots=True)
class Item:
    """An atom with a repeat count.

    Attributes:
        most: `None` means no limit.
        at: Offset in the grammar's text.
    """

    atom: Atom
    least: int = 1
    most: int | None = 1
    at: int = field(default=0, compare=False)


Alternative = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """The alternatives of a name.

    Attributes:
        is_group: Whether it was written as a group inside another rule.
        at: Offset in the grammar's text.
    """

    alternatives: tuple[Alternative, ...]
    is_group: bool = False
    at: int = field(default=0, compare=False)

    def references(self) -> Iterator[tuple[str, Item]]:
        """Yield the names of referenced rules, each with the referring item."""
        for alternative in self.alternatives:
            for item in alternative:
                if isinstance(item.atom, Reference):
                    yield item.atom.rule, item


Rules = Mapping[str, Rule]
ROOT = "root"
