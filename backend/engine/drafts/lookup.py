"""Drafts from a row's own text: the tokens after the last occurrence of its latest tokens."""

from collections.abc import Sequence

# A shorter match is not worth a draft.
MATCH_TOKENS = 3
# Matches are measured up to this length: longer ones are no more reliable.
MAX_MATCH_TOKENS = 32


class Lookup:
    """An index of the runs of tokens in one text, which may grow at the end."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """Index a text.

        Args:
            tokens: The row's live list; only tokens added later are read again.
        """
        self._tokens = tokens
        self._indexed = 0
        self._latest: dict[tuple[int, ...], int] = {}

    def follow(self, limit: int) -> tuple[list[int], int]:
        """Return up to `limit` tokens that may come next, and how many tokens matched.

        The last earlier occurrence of the latest tokens counts. A text that repeats itself up to
        its end is continued in a loop.
        """
        self._catch_up()
        tokens = self._tokens
        end = len(tokens)
        place = self._latest.get(tuple(tokens[end - MATCH_TOKENS :]))
        if place is None or limit <= 0:
            return [], 0
        period = end - place
        found = [tokens[place + n % period] for n in range(limit)]
        return found, self._match_length(place, end)

    def _catch_up(self) -> None:
        """Index the runs that end before the last token: the last run is the query."""
        tokens, latest = self._tokens, self._latest
        for end in range(max(self._indexed, MATCH_TOKENS), len(tokens)):
            latest[tuple(tokens[end - MATCH_TOKENS : end])] = end
        self._indexed = max(self._indexed, len(tokens))

    def _match_length(self, place: int, end: int) -> int:
        """Return how many tokens before two positions are equal."""
        tokens = self._tokens
        length = MATCH_TOKENS
        most = min(place, MAX_MATCH_TOKENS)
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length
