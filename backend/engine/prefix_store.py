"""The interface between rows and the prompt cache.

Saving never fails a request, and a prefix that cannot be restored is computed.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from os.path import realpath
from pathlib import Path

import mlx.core as mx

from backend.cache.disk_tier import DiskTier, NodeDirectory, StoredNode
from backend.cache.eviction import Forecast
from backend.cache.kv import LooseNode, Packing, Segment, Size, evaluate, from_plain, to_plain
from backend.cache.layers import in_pieces
from backend.cache.layout import CacheLayout, CaptureError
from backend.cache.node_files import NodeHeader
from backend.cache.prompt_cache import PrefixHit, PromptCache
from backend.cache.radix import TokenKey, agrees_again
from backend.config import COPY_PIECE_BYTES, CUT_PER_LOSS
from backend.core.metric_table import Values
from backend.core.model import Reuse
from backend.core.prefix_listing import ListingRequest, PromptCacheListing
from backend.core.prompt import Place
from backend.core.request import CacheHint
from backend.engine.messages.protocol import DiskChanged, DiskNews, Fetched
from backend.engine.plan import Caches, FreshCaches
from backend.engine.rows.admission import Sharing
from backend.engine.rows.row import Row
from common.log import Seldom

CLOSE_TIMEOUT_S = 2.0
# Paths of callers that are remembered as of no use.
MAX_TRIED_PATHS = 64
WARNING_INTERVAL_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """The settings of the disk tier.

    Attributes:
        root: The directory for all models; `None` waits for a request with one.
        models_dir: Requests may only name directories below it; `None` allows none.
        fingerprint: Identifies the loaded model.
        budget_bytes: The maximum size of the files of all models.
        post: Receives nodes read, and news of writes; called on the disk's thread.
    """

    root: Path | None = None
    models_dir: Path | None = None
    fingerprint: str = ""
    budget_bytes: int = 0
    post: Callable[[DiskNews], None] = field(default=lambda _: None)


class DiskLink:
    """An optional disk tier; belongs to the main thread."""

    def __init__(self, settings: DiskSettings, *, ends_at_snapshots: bool) -> None:
        """Open the directory of the options, if any.

        Args:
            ends_at_snapshots: Whether a prefix can be resumed only at snapshots.
        """
        self._settings = settings
        self._ends_at_snapshots = ends_at_snapshots
        self._tier: DiskTier | None = None
        self._tried: dict[str, None] = {}
        self._warnings = Seldom(WARNING_INTERVAL_S)
        if settings.root is not None:
            self._open(settings.root, "cache_dir")

    @property
    def is_open(self) -> bool:
        """Whether nodes can be written."""
        return self._tier is not None and self._tier.is_open

    @property
    def metrics(self) -> Values:
        """The numbers of the files."""
        return self._tier.metrics if self._tier else {}

    def read(self, row: Row, known: int) -> bool:
        """Start reading the path of a row's prompt; false without a disk.

        The result is posted as `Fetched`, once, even if empty.
        """
        self._open_for(row.params.cache_path)
        if self._tier is None:
            return False
        request_id, post = row.request_id, self._settings.post
        return self._tier.read(
            row.prompt_key, known, lambda nodes: post(Fetched(request_id, tuple(nodes)))
        )

    def write(self, node: LooseNode) -> bool:
        """Queue a node for writing; false if the queue is full, or nothing can be written."""
        if self._tier is None or not self._tier.is_open:
            return False
        if not node.segment.tokens and node.segment.snapshot is None:
            return True
        return self._tier.write(StoredNode(node.key, node.start, to_plain(node.segment)))

    def write_evicted(self, nodes: Iterable[LooseNode]) -> None:
        """Queue evicted nodes for writing, as many as fit."""
        for node in nodes:
            if not self.write(node) and self._tier is not None:
                self._tier.count_dropped()

    def take_lost(self) -> list[NodeHeader]:
        """Return nodes lost from files, or never written although `write` accepted them."""
        return self._tier.take_lost() if self._tier is not None else []

    def close(self) -> None:
        """Write the queued nodes, for a limited time."""
        if self._tier is not None:
            self._tier.close(CLOSE_TIMEOUT_S)

    def _open_for(self, path: str) -> None:
        """Open the directory named by a request, unless one is open."""
        if self._tier is not None or not path or path in self._tried:
            return
        if len(self._tried) == MAX_TRIED_PATHS:
            del self._tried[next(iter(self._tried))]
        self._tried[path] = None
        models_dir = self._settings.models_dir
        wanted = Path(realpath(path))
        if models_dir is None or not wanted.is_relative_to(realpath(models_dir)):
            self._warn("PromptCachePath %s is ignored: it is not below the models", path)
        else:
            self._open(wanted, "PromptCachePath")

    def _warn(self, problem: str, *values: object) -> None:
        """Log a problem, but not that of every path that callers make up."""
        if self._warnings.is_due():
            log.warning(problem, *values)

    def _open(self, root: Path, named: str) -> None:
        settings = self._settings
        try:
            directory = NodeDirectory(root, settings.fingerprint, settings.budget_bytes)
        except OSError as error:
            self._warn("%s: nothing is kept on disk: %s", named, error)
        else:
            self._tier = DiskTier(
                directory,
                lambda: settings.post(DiskChanged()),
                ends_at_snapshots=self._ends_at_snapshots,
            )


SAVE_INTERVAL_TOKENS = 2048
# Reusing tokens that another row computed meanwhile costs a rebuild.
MIN_GAIN_TOKENS = 64
# Reading less from disk is no faster than computing it.
MIN_FETCH_TOKENS = 128
# The tokens before a difference that tell its cause from others.
CAUSE_TOKENS = 16

_FAILURES = (CaptureError, RuntimeError, ValueError, TypeError, LookupError, MemoryError)


class PrefixStore:
    """Restores rows from a prompt cache and saves them to it; belongs to the main thread.

    Without a budget, or for a model whose caches cannot be stored, it stores nothing.
    """

    def __init__(
        self,
        fresh_caches: FreshCaches,
        budget: Size,
        packing: Packing,
        disk: DiskSettings,
        *,
        forecast: Forecast | None = None,
        is_replicated: bool = False,
    ) -> None:
        """Start empty.

        Args:
            disk: Receives evicted and idle nodes, if set.
            forecast: The likelihood of future requests; `None` learns it from past ones.
        """
        self.fresh_caches = fresh_caches
        self._overlooked = () if is_replicated else _FAILURES
        found = CacheLayout.of(fresh_caches(), packing) if budget.nbytes else None
        self._is_on = found is not None
        self.layout = layout = found or CacheLayout((), packing)
        self._budget_bytes = budget.nbytes if found else 0
        self._disk = DiskLink(disk if found else DiskSettings(), ends_at_snapshots=layout.has_state)
        self.store = PromptCache(
            self._budget_bytes,
            layout.usable,
            thinning=layout.thinning,
            on_evict=self._disk.write_evicted,
            forecast=forecast,
            max_arrays=budget.arrays,
        )
        self._volatile_causes: set[bytes] = set()

    @property
    def reuse(self) -> Reuse:
        """Where prefixes can be resumed."""
        return self.layout.reuse

    def _reuses(self, row: Row) -> bool:
        """Tell whether a row may take its prefix from the store."""
        return self._is_on and row.may_reuse

    def _remembers(self, row: Row) -> bool:
        """Tell whether a row's fed tokens may be stored."""
        return self._is_on and row.is_remembered

    def refer(self) -> None:
        """Let rows use nodes in place from now on; none has caches at present."""
        if self._is_on and (layout := CacheLayout.of(self.fresh_caches(), self.layout.packing)):
            self.layout = layout

    def fetch(self, row: Row) -> bool:
        """Start reading a new row's prefix from disk; false if no wait is needed or worthwhile."""
        if not self._is_on:
            return False
        known = self.store.stored(row.prompt_key)
        lacks = len(row.prompt_key) - known
        return lacks >= MIN_FETCH_TOKENS and self._disk.read(row, known)

    def take_in(self, fetched: Fetched) -> None:
        """Store nodes read from disk while there is room; none of them is written again."""
        for node in fetched.nodes:
            try:
                segment = from_plain(node.segment)
                evaluate([segment])
            except _FAILURES as error:
                log.warning("nodes read from disk do not fit", exc_info=error)
                return
            if not self.store.insert(node.key, node.start, segment, is_saved=True):
                return

    def claim(self, row: Row) -> None:
        """Protect the stored part of a row's prompt: others are evicted first."""
        if self._reuses(row):
            self._lookup(row)

    def sharable(self, row: Row) -> Sharing:
        """Return the part of the store that a new row would use in place; changes nothing."""
        key = row.prompt_key
        path = self.store.preview(key) if self._reuses(row) else ()
        length = sum(piece.tokens for piece in path)
        if row.splits_medium(length) and (span := row.media_at(length)):
            path = self.store.preview(key[: span.start + 1])
        tokens = self.layout.referable(path)
        return Sharing(tokens, self.store.used_tokens(key[:tokens]))

    def use(self, row: Row, tokens: int) -> None:
        """Pin the first positions of a row until it leaves; 0 is none."""
        row.share(tokens)
        self.store.use(row.request_id, row.prompt_key[:tokens])

    @property
    def used_tokens(self) -> int:
        """The tokens of the store that rows use in place, shared ones once."""
        return self.store.used_tokens(TokenKey(b""))

    @property
    def nbytes(self) -> int:
        """The size of the store."""
        return self.store.nodes.size.nbytes

    def restore(self, row: Row) -> None:
        """Restore the stored part of a prefilling row's prompt, if it has less.

        Cheap if nothing was stored since the last call for this row.
        """
        if self._reuses(row) and row.seen_version != self.store.version:
            self._restore(row)
            self._note_shared(row)

    def _restore(self, row: Row) -> None:
        version, hit = self.store.version, self._lookup(row)
        row.note_lookup(hit, version)
        self._warn_of_volatile(row, hit)
        if hit.length - row.fed >= (MIN_GAIN_TOKENS if row.fed else 1):
            self._rebuild(row, hit)

    def _lookup(self, row: Row) -> PrefixHit:
        """Look a row's prompt up; a prefix never ends inside a medium."""
        if row.params.cache_hint is CacheHint.ONCE:
            self.store.note_once(row.request_id)
        hit = self.store.lookup(row.prompt_key, row.request_id)
        if row.splits_medium(hit.length) and (span := row.media_at(hit.length)):
            return self.store.lookup(row.prompt_key[: span.start + 1], row.request_id)
        return hit

    def room(self, row: Row) -> int:
        """Return how many tokens the row may prefill before the next snapshot."""
        if not self.layout.has_state:
            return row.prefill_left
        ahead = [place for place in row.boundaries if place > row.fed]
        stop = min([*ahead, max(row.saved + SAVE_INTERVAL_TOKENS, row.fed + 1)])
        return min(stop - row.fed, row.prefill_left)

    def save(self, row: Row) -> None:
        """Store at boundaries and at intervals; with windows always, because they forget."""
        if row.splits_medium(row.fed) or not self._remembers(row):
            return
        if self.layout.has_windows or self._is_due(row):
            self._save(row)
            self._share(row)

    def leave(self, row: Row) -> None:
        """Store all computed tokens of a row, and release its path.

        Beyond boundaries too: the next prompt may start with the reply.
        """
        is_whole = row.cache is not None and not row.splits_medium(row.fed)
        if is_whole and row.fed > row.saved and self._remembers(row):
            self._save(row)
        if self.reuse is not Reuse.ANYWHERE:
            next_question = row.request.prompt.next_question
            self.store.note_turn(row.request_id, row.prompt_key[:next_question])
        self.store.release(row.request_id)
        row.share(0)
        if row.params.cache_hint is CacheHint.KEEP:
            self.expect(row.request_id)

    def expect(self, request_id: str, *, is_again: bool = False) -> None:
        """Record that another request will continue an ended one, or send its prompt again."""
        self.store.expect(request_id, is_again=is_again)

    def record(self, row: Row) -> None:
        """Count a row with its first token: its prompt, and the restored part of it."""
        if self._is_on:
            prompt_tokens = len(row.request.prompt.token_ids)
            self.store.record(prompt_tokens, row.cached_tokens, row.hit_kind)

    def leave_room(self, nbytes: int) -> None:
        """Limit the store to this size, and to the budget."""
        self._note_lost()
        self.store.resize(min(nbytes, self._budget_bytes))

    @property
    def wants_rest(self) -> bool:
        """Whether `rest` would have something to do."""
        return self._disk.is_open and self.store.has_unsaved

    def rest(self) -> None:
        """Write nodes to disk that are not there yet; called when the engine is idle."""
        self.store.save(self._disk.write)

    def close(self) -> None:
        """Write the rest, for a limited time."""
        self.rest()
        self._disk.close()

    def metrics(self) -> Values:
        """Return the numbers of memory and disk."""
        return {**self.store.metrics(), **self._disk.metrics}

    def listing(self, request: ListingRequest) -> PromptCacheListing:
        """List the nodes in memory."""
        return self.store.listing(request, has_disk=self._disk.is_open)

    def check(self) -> None:
        """Raise AssertionError unless the counts are right."""
        self.store.check()

    def _is_due(self, row: Row) -> bool:
        is_boundary = self.layout.has_state and row.fed in row.boundaries
        is_long = row.fed >= row.saved + SAVE_INTERVAL_TOKENS
        return is_boundary or is_long or row.prefill_left == 0

    def _rebuild(self, row: Row, hit: PrefixHit) -> None:
        caches = self.fresh_caches()
        try:
            self.layout.restore(caches, hit.path, hit.length, len(row.token_ids))
            for piece in in_pieces(caches, COPY_PIECE_BYTES // CUT_PER_LOSS**row.losses):
                mx.eval(piece)
        except self._overlooked as error:
            problem = "request id=%s: its prefix cannot be restored and is computed"
            log.warning(problem, row.request_id, exc_info=error)
            row.stop_reuse()
        else:
            row.take_over(caches, hit.length, hit.kind)

    def _note_lost(self) -> None:
        """Have nodes lost by the disk written again when memory evicts them."""
        for node in self._disk.take_lost():
            self.store.note_lost(node.key, node.start)

    def _save(self, row: Row) -> None:
        self._note_lost()
        try:
            self._store_missing(row, row.cache or [])
            self._refill_windows(row, row.cache or [])
            self._pin_system_prompt(row)
        except self._overlooked as error:
            log.warning("request id=%s cannot be stored", row.request_id, exc_info=error)
        row.note_saved()

    def _share(self, row: Row) -> None:
        """Switch the row to the store's copy of its computed tokens, as for other rows."""
        caches = row.cache or []
        try:
            self.layout.refer(caches, self.store.path(row.key()))
            mx.eval([cache.state for cache in caches])
        except self._overlooked as error:
            log.warning("request id=%s keeps its own copy", row.request_id, exc_info=error)
        self._note_shared(row)

    def _note_shared(self, row: Row) -> None:
        """Record how much of the store the row uses in place."""
        row.share(self.layout.shared(row.cache or []))
        self.store.use(row.request_id, row.key()[: row.shared])

    def _pin_system_prompt(self, row: Row) -> None:
        system_tokens = row.request.prompt.system_tokens
        if 0 < system_tokens <= row.fed and not row.is_system_pinned:
            self.store.pin(row.prompt_key[:system_tokens])
            row.note_pinned()

    def _store_missing(self, row: Row, caches: Caches) -> None:
        """Store the tokens of a row's caches that the tree lacks."""
        key = row.key()
        start = self.store.stored(key)
        blocks = self.layout.capture(caches, start, row.fed)
        snapshot = None if self.store.has_snapshot(key) else self.layout.snapshot(caches)
        segments = [Segment((block,)) for block in blocks]
        if snapshot is not None:
            segments[-1:] = [Segment(blocks[-1:], snapshot)]
        for segment in segments:
            # One at a time: nodes without room must not be copied.
            evaluate([segment])
            stop = start + segment.tokens
            place = row.place if stop == row.fed else Place.INNER
            if not self.store.insert(key[:stop], start, segment, owner=row.request_id, place=place):
                return
            start = stop

    def _refill_windows(self, row: Row, caches: Caches) -> None:
        """Restore evicted windows of the tree from tokens that the row has just computed."""
        if self.layout.has_windows:
            windows_from = self.layout.windows_from(caches)
            refilled = partial(self.layout.with_windows, caches)
            self.store.refill(row.key(), windows_from, refilled)

    def _warn_of_volatile(self, row: Row, hit: PrefixHit) -> None:
        """Log once per cause why nearly equal prompts do not hit."""
        cause = row.prompt_key[max(hit.matched - CAUSE_TOKENS, 0) : hit.matched].packed
        if hit.parts_in_reply or cause in self._volatile_causes:
            return
        if agrees_again(row.prompt_key, hit.matched, hit.beyond):
            self._volatile_causes.add(cause)
            log.warning(
                "request id=%s differs from an earlier prompt in a few tokens after the first %d, "
                "and agrees with it again: a date, an id or a counter there costs the prompt cache "
                "the other %d tokens, which are computed again in each request; move it to the end",
                row.request_id,
                hit.matched,
                len(row.prompt_key) - hit.matched,
            )
