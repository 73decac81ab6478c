"""Lazily opened connection to the disk tier; disabled for good after a failure."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import realpath
from pathlib import Path

from backend.cache.disk.node_directory import NodeDirectory, StoredNode
from backend.cache.disk.node_file import NodeHeader
from backend.cache.disk.tier import DiskTier
from backend.cache.kv import LooseNode
from backend.cache.plain import to_plain
from backend.core.metric_table import Values
from backend.engine.messages.commands import DiskChanged, DiskNews, Fetched
from backend.engine.rows.row import Row

CLOSE_TIMEOUT_S = 2.0

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
            settings: Its settings.
            ends_at_snapshots: Whether a prefix can be resumed only at snapshots.
        """
        self._settings = settings
        self._ends_at_snapshots = ends_at_snapshots
        self._tier: DiskTier | None = None
        self._tried: set[str] = set()
        if settings.root is not None:
            self._open(settings.root)

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
        self._open_for(row.request.cache_path)
        if self._tier is None:
            return False
        return self._tier.read(row.prompt_key, known, partial(self._post, row.request_id))

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

    def _post(self, request_id: str, nodes: Sequence[StoredNode]) -> None:
        self._settings.post(Fetched(request_id, tuple(nodes)))

    def _open_for(self, path: str) -> None:
        """Open the directory named by a request, unless one is open."""
        if self._tier is not None or not path or path in self._tried:
            return
        self._tried.add(path)
        models_dir = self._settings.models_dir
        wanted = Path(realpath(path))
        if models_dir is None or not wanted.is_relative_to(realpath(models_dir)):
            log.warning("PromptCachePath %s is ignored: it is not below the models", path)
        else:
            self._open(wanted)

    def _open(self, root: Path) -> None:
        settings = self._settings
        try:
            directory = NodeDirectory(root, settings.fingerprint, settings.budget_bytes)
        except OSError as error:
            log.warning("prompt cache: nothing is kept on disk: %s", error)
        else:
            self._tier = DiskTier(
                directory,
                lambda: settings.post(DiskChanged()),
                ends_at_snapshots=self._ends_at_snapshots,
            )
