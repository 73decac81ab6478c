"""Constraints on tokens: a grammar, and its matcher for one reply."""

from typing import Any, Protocol, runtime_checkable


class ReplyMatcher(Protocol):
    """Tells which tokens may come next in one reply; never raises."""

    def consume(self, token_id: int) -> bool:
        """Advance by a token, and return whether it was allowed."""

    def fill_mask(self, row: Any) -> None:  # noqa: ANN401 (an array: the nouns know no NumPy)
        """Write one bit per token into a row of int32: 1 if it may come next."""

    @property
    def error(self) -> str | None:
        """The error that stopped the matcher, if any."""


@runtime_checkable
class ReplyGrammar(Protocol):
    """A compiled grammar; safe from any thread."""

    def matcher(self) -> ReplyMatcher:
        """Return a matcher for one reply."""
