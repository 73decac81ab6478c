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
    """Publishes tokens, counts them and lets go of rows that have ended; on the main thread."""

    def __init__(
        self,
        requests: OpenRequests,
        prefixes: PrefixStore,
        publisher: Publisher,
        counters: Counters,
    ) -> None:
        """Take the parts that a token passes through.

        Args:
            requests: Lets go of rows that have ended.
            prefixes: Counts the prompts whose first token has come.
            publisher: Takes the tokens.
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
        # Last: what fails here costs nobody a token.
        for row, _ in steps:
            if row.generated == 1:
                self._prefixes.record(row)
        self._requests.forget_ended(row for row, _ in steps)

    def settle(self, streams: int) -> None:
        """Hand events over if so many streams may be replied to again."""
        self._publisher.settle(streams)

    def hurry(self) -> None:
        """Hand events over if somebody waits for one of them."""
        self._publisher.hurry()

    def flush(self) -> None:
        """Hand all events over."""
        self._publisher.flush()
