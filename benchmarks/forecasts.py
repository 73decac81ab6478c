"""What prompt caches give up that know the requests to come, or only those of the past."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backend.cache.token_key import TokenKey
from backend.cache.worth import SegmentNode

_LESS_PER_REQUEST = 1e-6


class Clairvoyant:
    """A forecast that knows the rest of a trace: wanted sooner is worth more, never is nothing.

    Attributes:
        now: The number of the present request.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], *, has_snapshots: bool) -> None:
        """Take the trace.

        Args:
            prompts: Of all requests, in order.
            has_snapshots: Whether prefixes can be taken up at snapshots only.
        """
        self.now = 0
        # The last token of a prompt is always computed.
        self._prompts = [TokenKey.from_ids(prompt[:-1]) for prompt in prompts]
        self._has_snapshots = has_snapshots
        self._shared: dict[bytes, npt.NDArray[np.int64]] = {}

    def resumption(self, leaf: SegmentNode) -> float:
        """Return 1 over the requests until one goes into a leaf."""
        return self._soonest(self._reach(leaf.key) > leaf.start)

    def branching(self, node: SegmentNode) -> float:
        """Return 1 over the requests until one can go on from no place below a node."""
        wanted = self._reach(node.key) >= node.end
        pending = list(node.children.values())
        while pending:
            below = pending.pop()
            if self._has_snapshots and below.value.snapshot is None:
                pending.extend(below.children.values())
            else:
                wanted = wanted & (self._reach(below.key) < below.end)
        return self._soonest(wanted)

    def newcomer(self, key: TokenKey) -> float:
        """Return 1 over the requests until one shares a prefix as a whole."""
        return self._soonest(self._reach(key) >= len(key))

    def _soonest(self, wanted: npt.NDArray[np.bool_]) -> float:
        places = np.flatnonzero(wanted[self.now :])
        return 1.0 / (float(places[0]) + 1.0) if len(places) else 0.0

    def _reach(self, key: TokenKey) -> npt.NDArray[np.int64]:
        """Return how many tokens each request shares with a prefix."""
        if key.packed not in self._shared:
            shared = [prompt.common_prefix(key) for prompt in self._prompts]
            self._shared[key.packed] = np.array(shared, np.int64)
        return self._shared[key.packed]


class LeastRecent:
    """A forecast that makes an LRU of the same tree: what was used last is wanted next.

    Attributes:
        now: The number of the present request.
    """

    def __init__(self) -> None:
        self.now = 0

    def resumption(self, leaf: SegmentNode) -> float:
        """Return less than any place that was used later could make up for by its tokens."""
        return float(_LESS_PER_REQUEST ** (self.now - leaf.used_at))

    def branching(self, node: SegmentNode) -> float:
        """Return the same for a place inside a conversation."""
        return self.resumption(node)

    def newcomer(self, key: TokenKey) -> float:  # noqa: ARG002 (the protocol's)
        """Return that what is used now is used last."""
        return 1.0
