"""One reply and the grammar that it follows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Where one text is forced, the tokens that it may begin with are few.
_MAX_FORCED_CHOICES = 64


class GrammarMatcher:
    """Says which tokens may come next in one reply; used by one thread at a time.

    No method raises: `error` tells of a failure, and the request should end with it.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        """Take over a matcher that has no other user.

        Args:
            matcher: At the start of the reply.
            tokenizer: Of its vocabulary.
        """
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._latest_mask: NDArray[np.int32] | None = None

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
        self._latest_mask = row

    @property
    def may_force(self) -> bool:
        """Whether the latest mask leaves as few choices as a forced text does."""
        mask = self._latest_mask
        return mask is None or int.from_bytes(mask.tobytes()).bit_count() <= _MAX_FORCED_CHOICES

    def forced(self) -> list[int]:
        """Return the tokens of the only text that may come next, if there is only one.

        Other tokens may spell the same text; markers that are tokens of their own end it.
        """
        # On a copy: llguidance takes what is forced for read, and other spellings are errors then.
        text = self._matcher.deep_copy().compute_ff_bytes()
        if not text:
            return []
        return self._tokenizer.greedy_tokenize(_whole_characters(text))

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after another."""
        return self._matcher.validate_tokens(list(token_ids))

    def step_back(self, count: int) -> None:
        """Return to where it was before the latest `count` tokens; none of them ended the reply."""
        self._matcher.rollback(count)

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


def _whole_characters(text: bytes) -> str:
    """Return the UTF-8 at the start of some bytes; llguidance writes markers as what is none."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
