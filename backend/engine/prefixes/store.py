"""The interface between rows and the prompt cache.

Saving never fails a request, and a prefix that cannot be restored is computed.
"""

from typing import Protocol

from backend.core.model import Reuse
from backend.core.prompt_cache import ListingRequest, PromptCacheListing
from backend.core.status import PromptCacheStatus
from backend.engine.messages.commands import Fetched
from backend.engine.rows.admission import Sharing
from backend.engine.rows.row import Row


class PrefixStore(Protocol):
    """Restores rows from a prompt cache and saves them to it; belongs to the main thread."""

    @property
    def reuse(self) -> Reuse:
        """Where prefixes can be taken up."""

    def fetch(self, row: Row) -> bool:
        """Begin to read a new row's prefix from disk; false when there is nothing to wait for."""

    def take_in(self, fetched: Fetched) -> None:
        """Store what was read from disk for a row."""

    def claim(self, row: Row) -> None:
        """Hold what is stored of a row's prompt: room is made elsewhere first."""

    def sharable(self, row: Row) -> Sharing:
        """Return what a row that has computed nothing would use of the store, in place."""

    def use(self, row: Row, tokens: int) -> None:
        """Let a row count on so many first positions, which stay until it leaves; 0 is none."""

    @property
    def used_tokens(self) -> int:
        """The tokens of the store that rows use in place, shared ones once."""

    def restore(self, row: Row) -> None:
        """Give a row that prefills as much of its prompt as is stored, if it has less.

        Cheap when nothing was stored since the last call for this row.
        """

    def room(self, row: Row) -> int:
        """Return how many tokens the row may prefill before it has to be saved."""

    def save(self, row: Row) -> None:
        """Store what a row has prefilled, if it is time to."""

    def leave(self, row: Row) -> None:
        """Store all that a row has computed, and let go of its path."""

    def expect(self, request_id: str) -> None:
        """Note that another request is sure to go on from one that has ended."""

    def record(self, row: Row) -> None:
        """Count a row whose first token has come."""

    def leave_room(self, nbytes: int) -> None:
        """Hold no more than so many bytes from now on, nor more than the budget."""

    @property
    def wants_rest(self) -> bool:
        """Whether `rest` would have something to do."""

    def rest(self) -> None:
        """Have written to disk what is not there yet; called when nobody waits for anything."""

    def close(self) -> None:
        """Have the rest written, for a bounded time."""

    def status(self) -> PromptCacheStatus:
        """Return a snapshot."""

    def listing(self, request: ListingRequest) -> PromptCacheListing:
        """List what memory holds."""

    def check(self) -> None:
        """Raise AssertionError unless the counts are right."""


class NoPrefixStore:
    """The prefix store of a model without a prompt cache."""

    reuse = Reuse.ANYWHERE
    used_tokens = 0
    wants_rest = False

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

    def expect(self, request_id: str) -> None:
        """Store nothing anyway."""

    def record(self, row: Row) -> None:
        """Count nothing."""

    def leave_room(self, nbytes: int) -> None:
        """Hold nothing anyway."""

    def rest(self) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Write nothing."""

    def status(self) -> PromptCacheStatus:
        """Return an empty snapshot."""
        return PromptCacheStatus()

    def listing(self, request: ListingRequest) -> PromptCacheListing:  # noqa: ARG002
        """Return an empty listing."""
        return PromptCacheListing()

    def check(self) -> None:
        """Have nothing to check."""
