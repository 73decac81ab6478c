"""Fills in templates of calls."""

from collections.abc import Iterable, Iterator, Mapping
from typing import assert_never

from backend.formats.template import Characters, Id, Maybe, Part, Slot
from backend.sampling.grammar.writer import Expression, GrammarWriter, Piece, sequence

_NUMBER = Expression("/0|[1-9][0-9]{0,3}/")


def fill(
    template: Iterable[Part], values: Mapping[Slot, Piece], writer: GrammarWriter
) -> Iterator[Piece]:
    """Yield the pieces of a filled template; values never contain markers, however they look."""
    for part in template:
        match part:
            case str():
                yield from writer.pieces(part)
            case Slot.INDEX:
                yield _NUMBER
            case Slot():
                yield values[part]
            case Maybe(inner):
                yield Expression(f"({sequence(fill(inner, values, writer))})?")
            case Characters(pattern):
                yield Expression(f"/{pattern}/")
            case Id(inner):
                yield from fill(inner, values, writer)
            case _:
                assert_never(part)
