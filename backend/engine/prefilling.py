"""The prefill of a loop: a chunk of one prompt, or several prompts that fit into one."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from backend.cache.layout import trim_windows
from backend.engine.drafts.drafting import Drafting
from backend.engine.memory import Memory
from backend.engine.passes.feeder import Feeder
from backend.engine.plan import BatchPlan
from backend.engine.prefix_store import PrefixStore
from backend.engine.rows.pacing import ChunkLimit, PrefillPacer
from backend.engine.rows.row import Row

# The longest prompt of a pass has at most this many times the tokens of the shortest.
MAX_PADDING = 2


@dataclass(eq=False, slots=True)
class Prefilling:
    """Computes chunks, and exchanges prefixes with the prompt cache; on the main thread."""

    feeder: Feeder
    _prefixes: PrefixStore
    _pacer: PrefillPacer
    _plan: BatchPlan
    _memory: Memory
    _drafting: Drafting | None = None
    _peak_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most memory that MLX has held so far."""
        return max(self._peak_bytes, int(mx.get_peak_memory()))

    def begin_drafts(self, drafting: Drafting | None) -> None:
        """Notify a drafting from now on, if there is one."""
        self._drafting = drafting

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a pass of one prompt that does not take too long."""
        return self._pacer.size

    @property
    def takes_several(self) -> bool:
        """Whether several prompts may be fed in one pass."""
        return self._plan.takes_several

    def choose(self, row: Row, companions: Sequence[Row], limit: ChunkLimit) -> list[Row]:
        """Restore the stored part of a row's prompt, and return the rows to feed in one pass.

        Args:
            companions: Rows that may be fed with it, while the chunk has room.

        Returns:
            No rows if all of the row's prompt was stored.
        """
        self._restore(row)
        return self._fitting(row, companions, limit) if row.prefill_left else []

    def feed(self, rows: Sequence[Row], limit: ChunkLimit) -> int:
        """Feed a chunk of one row's prompt, or the rest of several; passes on MLX's errors.

        Returns:
            The number of tokens fed.
        """
        before = [row.fed for row in rows]
        if len(rows) > 1:
            self._feed_together(rows)
        else:
            self._feed(rows[0], limit)
        counts = [row.fed - fed for row, fed in zip(rows, before, strict=True)]
        if self._drafting is not None and not rows[0].prefill_left:
            self._drafting.see(rows, counts)
        return sum(counts)

    def _restore(self, row: Row) -> None:
        self._prefixes.restore(row)
        self.feeder.align(row)

    def _fitting(self, row: Row, companions: Sequence[Row], limit: ChunkLimit) -> list[Row]:
        """Return the rows whose prompts fit into one chunk, with the padding between them."""
        chosen = [row]
        if not self.takes_several or limit.chunk(row.prefill_left) < row.prefill_left:
            return chosen
        for other in companions:
            self._restore(other)
            rows = [*chosen, other]
            lefts = [each.prefill_left for each in rows]
            count = len(rows) * max(lefts)
            is_even = min(lefts) * MAX_PADDING >= max(lefts)
            fits = self._memory.fitting_tokens(rows, count) >= count
            if is_even and count <= limit.tokens and fits:
                chosen.append(other)
        return chosen

    def _feed_together(self, rows: Sequence[Row]) -> None:
        count, started = sum(row.prefill_left for row in rows), time.monotonic()
        with self._measured(rows):
            self.feeder.feed_together(rows, self._plan)
        for row in rows:
            self._prefixes.save(row)
        self._pacer.record(count, time.monotonic() - started)

    def _feed(self, row: Row, limit: ChunkLimit) -> None:
        fed, started = row.fed, time.monotonic()
        chunk = limit.chunk(self._prefixes.room(row))
        with self._measured([row]):
            self.feeder.feed(row, self._memory.fitting_tokens([row], chunk))
        self._prefixes.save(row)
        trim_windows(row.cache or ())
        count, is_text = row.fed - fed, row.media_at(fed) is None
        self._pacer.record(count if is_text else 0, time.monotonic() - started)

    @contextmanager
    def _measured(self, rows: Sequence[Row]) -> Iterator[None]:
        """Learn the memory that a pass over rows takes besides their KV."""
        fed, before = sum(row.fed for row in rows), mx.get_active_memory()
        self._peak_bytes = self.peak_bytes
        mx.reset_peak_memory()
        yield
        nbytes = mx.get_peak_memory() - max(before, mx.get_active_memory())
        count = sum(row.fed for row in rows) - fed
        self._memory.reservations.passes.record(count, max(row.fed for row in rows), nbytes)
