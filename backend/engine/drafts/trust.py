"""How often the drafts of a source are right, and when to retry one that does not pay."""

from dataclasses import dataclass

# The weight of the latest token in the average.
_SHARE = 0.1
_REST_TOKENS = 32


@dataclass(slots=True)
class Trust:
    """The trust in one source of drafts for one row.

    Attributes:
        chance: The chance that a drafted token is right, given that all before it are.
        pays: Whether its latest draft was expected to save time.
    """

    chance: float
    pays: bool = True
    _tries_at: int = 0

    def expected(self, count: int) -> float:
        """Return the expected number of right tokens out of `count`."""
        if self.chance >= 1.0:
            return float(count)
        return self.chance * (1.0 - self.chance**count) / (1.0 - self.chance)

    def learn(self, offered: int, accepted: int, position: int) -> None:
        """Learn from a draft.

        Args:
            offered: The number of its tokens.
            accepted: The number of right tokens.
            position: The number of tokens that the row has drawn so far.
        """
        for n in range(min(accepted + 1, offered)):
            self.chance += _SHARE * ((n < accepted) - self.chance)
        self._tries_at = position + _REST_TOKENS

    def rest(self, position: int) -> None:
        """Take no drafts until the row has drawn some tokens beyond `position`."""
        self.pays = False
        self._tries_at = position + _REST_TOKENS

    def wants_trial(self, position: int) -> bool:
        """Tell whether it is time to retry a source that did not pay."""
        return not self.pays and position >= self._tries_at
