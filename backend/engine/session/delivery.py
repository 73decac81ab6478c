"""The way of a token from the batch to its request's events."""

import time
from collections.abc import Sequence

from backend.core.step import PrefillDone
from backend.engine.messages.publisher import Publisher
from backend.engine.passes.attempt import RowStep
from backend.engine.prefixes.store import PrefixStore
from backend.engine.rows.counters import Counters
from backend.engine.rows.row import Row
from backend.engine.session.open_requests import OpenRequests


class Delivery:
    """Publishes and counts tokens and releases ended rows; on the main thread."""

    def __init__(
        self,
        requests: OpenRequests,
        prefixes: PrefixStore,
        publisher: Publisher,
        counters: Counters,
    ) -> None:
        """Create the delivery.

        Args:
            requests: Releases ended rows.
            prefixes: Counts prompts at their first token.
            publisher: Receives the tokens.
            counters: Count them.
        """
        self._requests = requests
        self._prefixes = prefixes
        self._publisher = publisher
        self._counters = counters

    def announce(self, row: Row) -> None:
        """Publish that a row's prompt is computed."""
        now = time.monotonic()
        done = PrefillDone(
            cached_tokens=row.cached_tokens,
            prefill_ms=(now - row.admitted_at) * 1000.0,
            hit_kind=row.hit_kind,
            parted_at=row.parted_at,
            ended_at=now,
        )
        self._publisher.put(row.request_id, done)

    def publish(self, steps: Sequence[RowStep]) -> None:
        """Publish tokens that have landed."""
        for row, step in steps:
            self._publisher.put(row.request_id, step, is_urgent=row.has_left or row.generated == 1)
            self._counters.count(step.token_id)
        # Last, so that a failure here costs no token.
        for row, _ in steps:
            if row.generated == 1:
                self._prefixes.record(row)
        self._requests.forget_ended(row for row, _ in steps)

    def settle(self, streams: int) -> None:
        """Hand over events if this many streams may get replies again."""
        self._publisher.settle(streams)

    def hurry(self) -> None:
        """Hand over events if one of them is urgent."""
        self._publisher.hurry()

    def flush(self) -> None:
        """Hand over all events."""
        self._publisher.flush()
