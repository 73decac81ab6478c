"""A limit on concurrent calls of one kind."""

from collections.abc import Iterator
from contextlib import contextmanager

from backend.errors import OverloadedError


class Quota:
    """Refuses calls beyond a number of concurrent ones; belongs to one event loop."""

    def __init__(self, limit: int, calls: str) -> None:
        """Start with no calls.

        Args:
            limit: Limit of concurrent calls.
        """
        self._limit = limit
        self._calls = calls
        self._taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a call until the block ends.

        Raises:
            OverloadedError: The limit is reached.
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
