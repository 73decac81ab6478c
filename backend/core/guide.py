"""What a request may demand of its tokens: a grammar, and a matcher for one reply."""

from typing import Any, Protocol


class ReplyMatcher(Protocol):
    """Says which tokens may come next in one reply; never raises."""

    def consume(self, token_id: int) -> bool:
        """Move over a token, and return whether it was allowed."""

    def fill_mask(self, row: Any) -> None:  # noqa: ANN401 (an array: the nouns know no NumPy)
        """Write one bit per token into a row of int32: 1 if it may come next."""

    @property
    def error(self) -> str | None:
        """What went wrong; `None` as long as nothing has."""


class ReplyGrammar(Protocol):
    """A compiled grammar; safe from any thread."""

    def matcher(self) -> ReplyMatcher:
        """Return a matcher for one reply."""
