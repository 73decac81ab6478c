"""A bound on calls of one kind that run at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from backend.errors import OverloadedError


class Quota:
    """Lets so many calls run at once and refuses others; belongs to one event loop."""

    def __init__(self, limit: int, calls: str) -> None:
        """Start with none taken.

        Args:
            limit: How many calls may run.
            calls: Their name in an error, in the plural.
        """
        self._limit = limit
        self._calls = calls
        self._taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a call until the block ends.

        Raises:
            OverloadedError: As many as may run do.
        """
        if self._taken >= self._limit:
            raise OverloadedError(
                f"{self._taken} {self._calls} are running, at most {self._limit} may: try later"
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
