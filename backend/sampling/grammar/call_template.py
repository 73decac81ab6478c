"""Templates of calls: texts in which the parts of a call are left open."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias, Union

from backend.sampling.grammar.writer import Expression, GrammarWriter, Piece, sequence


class Slot(Enum):
    """A part of a call that is left open; a quoted name is a JSON string."""

    NAME = auto()
    QUOTED_NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()


Part: TypeAlias = Union[str, Slot, Expression, "Maybe"]
Template: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Maybe:
    """What may be missing."""

    template: Template


def fill(
    template: Iterable[Part], values: Mapping[Slot, Piece], writer: GrammarWriter
) -> Iterator[Piece]:
    """Yield what a template comes to; values hold no markers, whatever they look like."""
    for part in template:
        match part:
            case str():
                yield from writer.pieces(part)
            case Slot():
                yield values[part]
            case Maybe(inner):
                yield Expression(f"({sequence(fill(inner, values, writer))})?")
            case Expression():
                yield part
