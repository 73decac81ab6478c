"""One reply and the grammar that it follows."""

from typing import TYPE_CHECKING

from llguidance import LLMatcher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class GrammarMatcher:
    """Says which tokens may come next in one reply; used by one thread at a time.

    No method raises: `error` tells of a failure, and the request should end with it.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        """Take over a matcher that has no other user."""
        self._matcher = matcher

    def consume(self, token_id: int) -> bool:
        """Move over a token, and return whether the grammar allowed it.

        A token that it did not allow is an error from then on.
        """
        return self._matcher.consume_token(token_id)

    def fill_mask(self, row: "NDArray[np.int32]") -> None:
        """Write one bit per token: 1 if it may come next, the lowest bit first.

        After an error, and when nothing may follow, only tokens that end the reply are allowed.

        Args:
            row: Contiguous, of `Vocabulary.mask_words` words.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    @property
    def is_accepting(self) -> bool:
        """Whether the reply may end here."""
        return self._matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing may follow but the end, which may have come already."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """The failure; `None` while there is none."""
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error().partition("\n")[0]
