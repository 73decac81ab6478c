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
            scheduler: Takes back the slots of ended requests.
            memory: Takes back their reservations.
            prefixes: Stores their computed tokens.
            publisher: Reports the failure of a request.
        """
        self._scheduler = scheduler
        self._memory = memory
        self._prefixes = prefixes
        self._publisher = publisher
        self._rows: dict[str, Row] = {}

    def add(self, row: Row) -> None:
        """Add a new request."""
        self._rows[row.request_id] = row

    def get(self, request_id: str) -> Row | None:
        """Return an open request by its id, if it exists."""
        return self._rows.get(request_id)

    def all(self) -> Sequence[Row]:
        """Return every open request, in the order of submission."""
        return list(self._rows.values())

    def drop(self, row: Row) -> None:
        """End a request whose caller has left."""
        row.has_left = True
        self._forget(row)

    def fail(self, row: Row, error: BackendError) -> None:
        """End a request with an error."""
        # A failed pass may have left anything in the caches.
        row.cache = None
        self._publisher.put(row.request_id, error, is_urgent=True)
        self.drop(row)

    def forget_ended(self, rows: Iterable[Row]) -> None:
        """Remove the rows that have had their last token."""
        for row in [row for row in rows if row.has_left]:
            self._forget(row)

    def store_caches(self, row: Row) -> None:
        """Store a row's computed tokens in the prompt cache, and drop its own caches."""
        self._prefixes.leave(row)
        row.cache = None

    def check(self) -> None:
        """Raise AssertionError unless the scheduler knows exactly these requests."""
        if set(self._scheduler.rows()) != set(self._rows.values()):
            raise AssertionError("the scheduler and the session know different rows")

    def _forget(self, row: Row) -> None:
        self._scheduler.release(row)
        # First, to make room for the row's tokens in the prompt cache.
        self._memory.release(row)
        self.store_caches(row)
        self._rows.pop(row.request_id, None)
