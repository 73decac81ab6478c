"""The interface between rows and the prompt cache.

Saving never fails a request, and a prefix that cannot be restored is computed.
"""

from typing import Protocol

from backend.core.metric_table import Values, zeros
from backend.core.model import Reuse
from backend.core.prompt_cache import ListingRequest, PromptCacheListing
from backend.engine.messages.commands import Fetched
from backend.engine.rows.admission import Sharing
from backend.engine.rows.row import Row


class PrefixStore(Protocol):
    """Restores rows from a prompt cache and saves them to it; belongs to the main thread."""

    @property
    def reuse(self) -> Reuse:
        """Where prefixes can be resumed."""

    def refer(self) -> None:
        """Let rows use the store in place from now on; none has caches at present."""

    def fetch(self, row: Row) -> bool:
        """Start reading a new row's prefix from disk; false if no wait is needed."""

    def take_in(self, fetched: Fetched) -> None:
        """Store nodes read from disk for a row."""

    def claim(self, row: Row) -> None:
        """Protect the stored part of a row's prompt: others are evicted first."""

    def sharable(self, row: Row) -> Sharing:
        """Return the part of the store that a new row would use in place."""

    def use(self, row: Row, tokens: int) -> None:
        """Pin the first positions of a row until it leaves; 0 is none."""

    @property
    def used_tokens(self) -> int:
        """The tokens of the store that rows use in place, shared ones once."""

    def restore(self, row: Row) -> None:
        """Restore the stored part of a prefilling row's prompt, if it has less.

        Cheap if nothing was stored since the last call for this row.
        """

    def room(self, row: Row) -> int:
        """Return how many tokens the row may prefill before it must be saved."""

    def save(self, row: Row) -> None:
        """Store a row's prefilled tokens, if it is time."""

    def leave(self, row: Row) -> None:
        """Store all computed tokens of a row, and release its path."""

    def expect(self, request_id: str, *, is_again: bool = False) -> None:
        """Record that another request will continue an ended one, or send its prompt again."""

    def record(self, row: Row) -> None:
        """Count a row with its first token."""

    def leave_room(self, nbytes: int) -> None:
        """Limit the store to this size, and to the budget."""

    @property
    def wants_rest(self) -> bool:
        """Whether `rest` would have something to do."""

    def rest(self) -> None:
        """Write nodes to disk that are not there yet; called when the engine is idle."""

    def close(self) -> None:
        """Write the rest, for a limited time."""

    def metrics(self) -> Values:
        """Return its numbers."""

    def listing(self, request: ListingRequest) -> PromptCacheListing:
        """List the nodes in memory."""

    def check(self) -> None:
        """Raise AssertionError unless the counts are right."""


class NoPrefixStore:
    """The prefix store of a model without a prompt cache."""

    reuse = Reuse.ANYWHERE
    used_tokens = 0
    wants_rest = False

    def refer(self) -> None:
        """Use nothing."""

    def fetch(self, row: Row) -> bool:  # noqa: ARG002 (the protocol's)
        """Never wait."""
        return False

    def take_in(self, fetched: Fetched) -> None:
        """Store nothing."""

    def claim(self, row: Row) -> None:
        """Hold nothing."""

    def sharable(self, row: Row) -> Sharing:  # noqa: ARG002 (the protocol's)
        """Share nothing."""
        return Sharing()

    def use(self, row: Row, tokens: int) -> None:
        """Share nothing."""

    def restore(self, row: Row) -> None:
        """Leave the row as it is."""

    def room(self, row: Row) -> int:
        """Never stop a prefill."""
        return row.prefill_left

    def save(self, row: Row) -> None:
        """Store nothing."""

    def leave(self, row: Row) -> None:
        """Store nothing."""

    def expect(self, request_id: str, *, is_again: bool = False) -> None:
        """Store nothing anyway."""

    def record(self, row: Row) -> None:
        """Count nothing."""

    def leave_room(self, nbytes: int) -> None:
        """Hold nothing anyway."""

    def rest(self) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Write nothing."""

    def metrics(self) -> Values:
        """Return zeros."""
        return zeros()

    def listing(self, request: ListingRequest) -> PromptCacheListing:  # noqa: ARG002
        """Return an empty listing."""
        return PromptCacheListing()

    def check(self) -> None:
        """Have nothing to check."""
