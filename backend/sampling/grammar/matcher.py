"""Matches one reply against its grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Where the text is forced, few tokens can begin it.
_MAX_FORCED_CHOICES = 64


class GrammarMatcher:
    """Tells which tokens may come next in one reply; used by one thread at a time.

    Methods never raise: `error` reports a failure, and the request should end with it.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        """Take over a matcher that has no other users.

        Args:
            matcher: At the start of the reply.
            tokenizer: Its vocabulary's tokenizer.
        """
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._latest_mask: NDArray[np.int32] | None = None

    def consume(self, token_id: int) -> bool:
        """Advance by a token; return whether the grammar allowed it.

        A token that is not allowed sets `error` for good.
        """
        return self._matcher.consume_token(token_id)

    def fill_mask(self, row: "NDArray[np.int32]") -> None:
        """Write one bit per token: 1 if it may come next, the lowest bit first.

        After an error, or at the end of the grammar, only tokens that end the reply are allowed.

        Args:
            row: Contiguous, of `Vocabulary.mask_words` words.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._latest_mask = row

    @property
    def may_force(self) -> bool:
        """Whether the latest mask leaves as few choices as forced text does."""
        mask = self._latest_mask
        return mask is None or int.from_bytes(mask.tobytes()).bit_count() <= _MAX_FORCED_CHOICES

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next, or none if there is a choice.

        Other tokens may spell the same text; markers that are single tokens end it.
        """
        # On a copy: llguidance counts forced text as read, and then rejects other spellings of it.
        text = self._matcher.deep_copy().compute_ff_bytes()
        if not text:
            return []
        return self._tokenizer.greedy_tokenize(_whole_characters(text))

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, in order, may come next."""
        return self._matcher.validate_tokens(list(token_ids))

    def step_back(self, count: int) -> None:
        """Undo the latest `count` tokens, none of which ended the reply."""
        self._matcher.rollback(count)

    @property
    def is_accepting(self) -> bool:
        """Whether the reply may end here."""
        return self._matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Whether only the end may follow, or the reply has already ended."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """The failure, or `None`."""
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error().partition("\n")[0]


def _whole_characters(text: bytes) -> str:
    """Return the valid UTF-8 at the start of bytes; llguidance writes markers as invalid bytes."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
