"""Between the rows and the prompt cache: what a row can take from it, and what it leaves there.

Saving never fails a request, and a prefix that cannot be restored is computed.
"""

import logging
from dataclasses import replace
from typing import Protocol, assert_never

import mlx.core as mx

from backend.cache.kv import Segment, evaluate
from backend.cache.layout import CacheLayout, CaptureError
from backend.cache.packing import Packing
from backend.cache.plain import from_plain
from backend.cache.prompt_cache import PrefixHit, PromptCache
from backend.cache.volatile import agrees_again
from backend.core.request import Remembered
from backend.core.status import PromptCacheStatus
from backend.engine.command import Fetched
from backend.engine.disk_link import DiskLink, DiskSettings
from backend.engine.network import Caches, FreshCaches
from backend.engine.row import MIN_BOUNDARY_DISTANCE, Row

SAVE_INTERVAL_TOKENS = 2048
# Taking over what another row computed meanwhile costs a rebuild.
MIN_GAIN_TOKENS = 64
# Reading less from disk is no faster than computing it.
MIN_FETCH_TOKENS = 128

_FAILURES = (CaptureError, RuntimeError, ValueError, TypeError, LookupError, MemoryError)

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Restores rows from a prompt cache and saves them to it; belongs to the engine thread."""

    @property
    def needs_boundaries(self) -> bool:
        """Whether prefixes can be taken up only where a snapshot was made."""

    def fetch(self, row: Row) -> bool:
        """Begin to read a new row's prefix from disk; false when there is nothing to wait for."""

    def take_in(self, fetched: Fetched) -> None:
        """Store what was read from disk for a row."""

    def claim(self, row: Row) -> None:
        """Hold what is stored of a row's prompt: room is made elsewhere first."""

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
        """Return a snapshot of the books."""

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""


def make_keeper(
    fresh_caches: FreshCaches, budget_bytes: int, packing: Packing, disk: DiskSettings
) -> Keeper:
    """Return the keeper of a model: one that keeps nothing if there is no room or no way."""
    layout = CacheLayout.of(fresh_caches(), packing) if budget_bytes else None
    return PrefixKeeper(fresh_caches, layout, budget_bytes, disk) if layout else NothingKept()


class NothingKept:
    """A keeper without a prompt cache."""

    needs_boundaries = False
    wants_rest = False

    def fetch(self, row: Row) -> bool:  # noqa: ARG002 (the protocol's)
        """Never wait."""
        return False

    def take_in(self, fetched: Fetched) -> None:
        """Store nothing."""

    def claim(self, row: Row) -> None:
        """Hold nothing."""

    def restore(self, row: Row) -> None:
        """Leave the row as it is."""

    def room(self, row: Row) -> int:
        """Never stop a prefill."""
        return row.prefill_left

    def save(self, row: Row) -> None:
        """Store nothing."""

    def leave(self, row: Row) -> None:
        """Store nothing."""

    def record(self, row: Row) -> None:
        """Count nothing."""

    def leave_room(self, nbytes: int) -> None:
        """Hold nothing anyway."""

    def rest(self) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Write nothing."""

    def status(self) -> PromptCacheStatus:
        """Return empty books."""
        return PromptCacheStatus()

    def check(self) -> None:
        """Have nothing to check."""


class PrefixKeeper:
    """Keeps prefixes of one loaded model in a store of its own."""

    def __init__(
        self,
        fresh_caches: FreshCaches,
        layout: CacheLayout,
        budget_bytes: int,
        disk: DiskSettings,
    ) -> None:
        """Start with an empty store.

        Args:
            fresh_caches: Makes caches of the model whose prefixes these are.
            layout: What they are made of.
            budget_bytes: What the store may hold.
            disk: Where nodes that are evicted or idle go, if anywhere.
        """
        self._fresh_caches = fresh_caches
        self._layout = layout
        self._budget_bytes = budget_bytes
        self._disk = DiskLink(disk, ends_at_snapshots=layout.has_state)
        self._store = PromptCache(
            budget_bytes, layout.usable, thinning=layout.thinning, rescue=self._disk.write
        )
        self._volatile_places: set[int] = set()

    @property
    def needs_boundaries(self) -> bool:
        """Whether some layer has a state."""
        return self._layout.has_state

    def fetch(self, row: Row) -> bool:
        """Ask the disk for what memory lacks, if that is worth it."""
        known = self._store.stored(row.prompt_key)
        lacks = len(row.prompt_key) - known
        return lacks >= MIN_FETCH_TOKENS and self._disk.read(row, known)

    def take_in(self, fetched: Fetched) -> None:
        """Store nodes as far as there is room; none of them is written again."""
        if fetched.source is not self._disk:
            return
        for node in fetched.nodes:
            try:
                segment = from_plain(node.segment)
                evaluate([segment])
            except _FAILURES as error:
                log.warning("what was read from disk does not fit", exc_info=error)
                return
            if not self._store.insert(node.key, node.start, segment, is_saved=True):
                return

    def claim(self, row: Row) -> None:
        """Look the prompt up, which makes its path the most recent one."""
        if row.may_reuse:
            self._lookup(row)

    def restore(self, row: Row) -> None:
        """Look the prompt up, unless that gave nothing the last time and nothing was stored."""
        if not row.may_reuse or row.seen_version == self._store.version:
            return
        row.seen_version = self._store.version
        hit = self._lookup(row)
        self._warn_of_volatile(row, hit)
        if hit.matched - hit.length >= MIN_BOUNDARY_DISTANCE:
            row.branch = hit.matched
        if hit.length - row.fed >= (MIN_GAIN_TOKENS if row.fed else 1):
            self._rebuild(row, hit)

    def _lookup(self, row: Row) -> PrefixHit:
        """Look a row's prompt up; a prefix ends where a medium does, never inside."""
        hit = self._store.lookup(row.prompt_key, row.request_id)
        if row.splits_medium(hit.length) and (span := row.media_at(hit.length)):
            return self._store.lookup(row.prompt_key[: span.start + 1], row.request_id)
        return hit

    def room(self, row: Row) -> int:
        """Stop where a snapshot is to be made."""
        if not self._layout.has_state:
            return row.prefill_left
        ahead = [place for place in row.boundaries if place > row.fed]
        stop = min([*ahead, max(row.saved + SAVE_INTERVAL_TOKENS, row.fed + 1)])
        return min(stop - row.fed, row.prefill_left)

    def save(self, row: Row) -> None:
        """Store at boundaries and now and then; windows forget, so with them always."""
        if row.splits_medium(row.fed) or not _is_remembered(row):
            return
        if self._layout.has_windows or self._is_due(row):
            self._save(row)

    def leave(self, row: Row) -> None:
        """Store also what is not at a boundary: the next prompt may begin with the reply."""
        is_whole = row.cache is not None and not row.splits_medium(row.fed)
        if is_whole and row.fed > row.saved and _is_remembered(row):
            self._save(row)
        self._store.release(row.request_id)

    def record(self, row: Row) -> None:
        """Count the prompt, and what of it was restored."""
        prompt_tokens = len(row.request.prompt.token_ids)
        self._store.record(prompt_tokens, row.cached_tokens, row.hit_kind)

    def leave_room(self, nbytes: int) -> None:
        """Let the store shrink, or grow back."""
        self._store.resize(min(nbytes, self._budget_bytes))

    @property
    def wants_rest(self) -> bool:
        """Whether the store holds what the disk does not."""
        return self._disk.is_open and self._store.has_unsaved

    def rest(self) -> None:
        """Write what is not on disk."""
        self._disk.write(self._store.take_unsaved())

    def close(self) -> None:
        """Write what is not on disk, as far as time allows."""
        self.rest()
        self._disk.close()

    def status(self) -> PromptCacheStatus:
        """Return the books of the store and of the disk."""
        return replace(self._store.status(), disk=self._disk.status)

    def check(self) -> None:
        """Check the store."""
        self._store.check()

    def _is_due(self, row: Row) -> bool:
        is_boundary = self._layout.has_state and row.fed in row.boundaries
        is_long = row.fed >= row.saved + SAVE_INTERVAL_TOKENS
        return is_boundary or is_long or row.prefill_left == 0

    def _rebuild(self, row: Row, hit: PrefixHit) -> None:
        caches = self._fresh_caches()
        try:
            self._layout.restore(caches, hit.path, hit.length, len(row.token_ids))
            mx.eval([cache.state for cache in caches])
        except _FAILURES as error:
            problem = "request id=%s: its prefix cannot be restored and is computed"
            log.warning(problem, row.request_id, exc_info=error)
            row.may_reuse = False
        else:
            row.take_over(caches, hit.length, hit.kind)

    def _save(self, row: Row) -> None:
        try:
            self._store_missing(row, row.cache or [])
            self._keep_system_prompt(row)
        except _FAILURES as error:
            log.warning("request id=%s cannot be stored", row.request_id, exc_info=error)
        row.saved = row.fed

    def _keep_system_prompt(self, row: Row) -> None:
        system_tokens = row.request.prompt.system_tokens
        if 0 < system_tokens <= row.fed and not row.is_system_kept:
            self._store.keep(row.prompt_key[:system_tokens])
            row.is_system_kept = True

    def _store_missing(self, row: Row, caches: Caches) -> None:
        """Store what the tree lacks of the tokens in a row's caches."""
        key = row.key()
        start = self._store.stored(key)
        blocks = self._layout.capture(caches, start, row.fed)
        snapshot = None if self._store.has_snapshot(key) else self._layout.snapshot(caches)
        segments = [Segment((block,)) for block in blocks]
        if snapshot is not None:
            segments[-1:] = [Segment(blocks[-1:], snapshot)]
        for segment in segments:
            # One at a time: what there is no room for must not be copied.
            evaluate([segment])
            stop = start + segment.tokens
            if not self._store.insert(key[:stop], start, segment, owner=row.request_id):
                return
            start = stop

    def _warn_of_volatile(self, row: Row, hit: PrefixHit) -> None:
        """Say once per place why prompts that are nearly the same do not hit."""
        if hit.matched in self._volatile_places:
            return
        if agrees_again(row.prompt_key, hit.matched, hit.beyond):
            self._volatile_places.add(hit.matched)
            log.warning(
                "request id=%s differs from an earlier prompt at token %d only for a moment: "
                "something volatile there, such as a date or an id, makes the rest of %d tokens "
                "be computed again",
                row.request_id,
                hit.matched,
                len(row.prompt_key) - hit.matched,
            )


def _is_remembered(row: Row) -> bool:
    """Tell whether what the row's caches hold may be stored."""
    match row.request.remembered:
        case Remembered.ALL:
            return True
        case Remembered.PROMPT:
            return row.fed <= len(row.request.prompt.token_ids)
        case Remembered.NOTHING:
            return False
        case _:
            assert_never(row.request.remembered)
