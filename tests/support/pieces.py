"""A value for radix trees that knows which tokens it describes."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Piece:
    """Tokens of one node; `sealed` ones end in a snapshot, so nothing may be joined to them."""

    tokens: tuple[int, ...]
    sealed: bool = False

    def split(self, at: int) -> tuple[Self, Self]:
        assert 0 < at < len(self.tokens)
        return type(self)(self.tokens[:at]), type(self)(self.tokens[at:], self.sealed)

    def joined(self, other: Self) -> Self | None:
        return None if self.sealed else type(self)(self.tokens + other.tokens, other.sealed)
