"""How often the drafts of a source come true, and when to try one again that does not."""

from dataclasses import dataclass

# Of the latest token in the average.
_SHARE = 0.1
_REST_TOKENS = 32


@dataclass(slots=True)
class Trust:
    """What is thought of one source of drafts for one row.

    Attributes:
        chance: That a drafted token is right, if all before it are.
        pays: Whether its latest draft was expected to save time.
    """

    chance: float
    pays: bool = True
    _tries_at: int = 0

    def expected(self, count: int) -> float:
        """Return how many of `count` tokens will be right, on average."""
        if self.chance >= 1.0:
            return float(count)
        return self.chance * (1.0 - self.chance**count) / (1.0 - self.chance)

    def learn(self, offered: int, accepted: int, position: int) -> None:
        """Learn from a draft.

        Args:
            offered: Its tokens.
            accepted: Those that were right.
            position: Tokens that the row has drawn by now.
        """
        for n in range(min(accepted + 1, offered)):
            self.chance += _SHARE * ((n < accepted) - self.chance)
        self._tries_at = position + _REST_TOKENS

    def rest(self, position: int) -> None:
        """Take no more drafts until the row has drawn some tokens beyond `position`."""
        self.pays = False
        self._tries_at = position + _REST_TOKENS

    def wants_trial(self, position: int) -> bool:
        """Tell whether it is time to see if a source that did not pay does by now."""
        return not self.pays and position >= self._tries_at
