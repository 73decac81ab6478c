"""Constraints on tokens: a grammar, and its matcher for one reply."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


class ReplyMatcher(Protocol):
    """Tells which tokens may come next in one reply; never raises."""

    def consume(self, token_id: int) -> bool:
        """Advance by a token, and return whether it was allowed."""

    def fill_mask(self, row: Any) -> None:  # noqa: ANN401 (an array: the nouns know no NumPy)
        """Write one bit per token into a row of int32: 1 if it may come next."""

    def forced(self) -> list[int]:
        """Return the tokens of the only text that may come next, if there is only one."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after another."""

    def step_back(self, count: int) -> None:
        """Return to where it was before the latest `count` tokens; none of them ended the reply."""

    @property
    def error(self) -> str | None:
        """The error that stopped the matcher, if any."""


@runtime_checkable
class ReplyGrammar(Protocol):
    """A compiled grammar; safe from any thread."""

    def matcher(self) -> ReplyMatcher:
        """Return a matcher for one reply."""
