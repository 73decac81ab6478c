"""The requests of a session, from submission to the end of each."""

from collections.abc import Iterable, Sequence

from backend.engine.messages.publisher import Publisher
from backend.engine.prefixes.store import PrefixStore
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler
from backend.engine.session.memory_watch import MemoryWatch
from backend.errors import BackendError


class OpenRequests:
    """The one place where a request leaves the engine; belongs to the main thread."""

    def __init__(
        self, scheduler: Scheduler, memory: MemoryWatch, prefixes: PrefixStore, publisher: Publisher
    ) -> None:
        """Start without requests.

        Args:
            scheduler: Gets the slots of requests that end.
            memory: Gets their reservations.
            prefixes: Gets the tokens that they have computed.
            publisher: Tells why a request failed.
        """
        self._scheduler = scheduler
        self._memory = memory
        self._prefixes = prefixes
        self._publisher = publisher
        self._rows: dict[str, Row] = {}

    def add(self, row: Row) -> None:
        """Take in a new request."""
        self._rows[row.request_id] = row

    def get(self, request_id: str) -> Row | None:
        """Return an open request, if there is one of that name."""
        return self._rows.get(request_id)

    def all(self) -> Sequence[Row]:
        """Return every open request, in the order of submission."""
        return list(self._rows.values())

    def drop(self, row: Row) -> None:
        """End a request that its caller has left."""
        row.has_left = True
        self._forget(row)

    def fail(self, row: Row, error: BackendError) -> None:
        """End a request with an error."""
        # A failed pass may have left anything in the caches.
        row.cache = None
        self._publisher.put(row.request_id, error, is_urgent=True)
        self.drop(row)

    def forget_ended(self, rows: Iterable[Row]) -> None:
        """Let go of those rows that have had their last token."""
        for row in [row for row in rows if row.has_left]:
            self._forget(row)

    def store_caches(self, row: Row) -> None:
        """Give what a row has computed to the prompt cache, and let go of its own caches."""
        self._prefixes.leave(row)
        row.cache = None

    def check(self) -> None:
        """Raise AssertionError unless the scheduler knows exactly these requests."""
        if set(self._scheduler.rows()) != set(self._rows.values()):
            raise AssertionError("the scheduler and the session know different rows")

    def _forget(self, row: Row) -> None:
        self._scheduler.release(row)
        # First, so that what the row leaves in the prompt cache finds room there.
        self._memory.release(row)
        self.store_caches(row)
        self._rows.pop(row.request_id, None)
