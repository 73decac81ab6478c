"""Forecasts of prompt caches that know future requests, or only past ones."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backend.cache.eviction import SegmentNode
from backend.cache.radix import TokenKey
from backend.core.prompt import Place

_LESS_PER_REQUEST = 1e-6


class Clairvoyant:
    """A forecast that knows the rest of a trace: wanted sooner is worth more, never is nothing.

    Attributes:
        now: The number of the present request.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], *, has_snapshots: bool) -> None:
        """Create the forecast of a trace.

        Args:
            prompts: Of all requests, in order.
            has_snapshots: Whether prefixes can be resumed only at snapshots.
        """
        self.now = 0
        # The last token of a prompt is always computed.
        self._prompts = [TokenKey.from_ids(prompt[:-1]) for prompt in prompts]
        self._has_snapshots = has_snapshots
        self._shared: dict[bytes, npt.NDArray[np.int64]] = {}

    def resumption(self, leaf: SegmentNode) -> float:
        """Return 1 over the requests until one reaches into a leaf."""
        return self._soonest(self._reach(leaf.key) > leaf.start)

    def branching(self, node: SegmentNode) -> float:
        """Return 1 over the requests until one can resume at a node but nowhere below."""
        wanted = self._reach(node.key) >= node.end
        pending = list(node.children.values())
        while pending:
            below = pending.pop()
            if self._has_snapshots and below.value.snapshot is None:
                pending.extend(below.children.values())
            else:
                wanted = wanted & (self._reach(below.key) < below.end)
        return self._soonest(wanted)

    def newcomer(self, key: TokenKey, place: Place) -> float:  # noqa: ARG002 (the protocol's)
        """Return 1 over the requests until another one shares a whole prefix."""
        wanted = self._reach(key) >= len(key)
        wanted[self.now] = False
        return self._soonest(wanted)

    def _soonest(self, wanted: npt.NDArray[np.bool_]) -> float:
        places = np.flatnonzero(wanted[self.now :])
        return 1.0 / (float(places[0]) + 1.0) if len(places) else 0.0

    def _reach(self, key: TokenKey) -> npt.NDArray[np.int64]:
        """Return the number of tokens that each request shares with a prefix."""
        if key.packed not in self._shared:
            shared = [prompt.common_prefix(key) for prompt in self._prompts]
            self._shared[key.packed] = np.array(shared, np.int64)
        return self._shared[key.packed]


class LeastRecent:
    """A forecast that turns the same tree into an LRU: the latest used is needed next.

    Attributes:
        now: The number of the present request.
    """

    def __init__(self) -> None:
        self.now = 0

    def resumption(self, leaf: SegmentNode) -> float:
        """Return a value so low that later used places win regardless of their tokens."""
        return float(_LESS_PER_REQUEST ** (self.now - leaf.used_at))

    def branching(self, node: SegmentNode) -> float:
        """Return the same for a place inside a conversation."""
        return self.resumption(node)

    def newcomer(self, key: TokenKey, place: Place) -> float:  # noqa: ARG002 (the protocol's)
        """Return the rank of the present as the latest use."""
        return 1.0
