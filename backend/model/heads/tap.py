"""The hidden states of a network's latest tokens, for a head that reads them."""

from collections.abc import Sequence

import mlx.core as mx

from backend.model.checkpoint.upstream import Network


class HiddenTap:
    """Keeps the outputs of some modules of a network in its latest pass."""

    def __init__(self, modules: Sequence[Network]) -> None:
        """Watch modules of a network whose weights are in memory."""
        self._count = len(modules)
        self._latest: dict[int, mx.array] = {}
        for place, module in enumerate(modules):
            module.__class__ = _tapped(type(module), self._latest, place)

    def take(self) -> Sequence[mx.array]:
        """Return the hidden states [B, T, D] of each module in the latest pass, and forget them.

        They may be lazy. Empty if no pass was made since the last call.
        """
        states = [self._latest.pop(place, None) for place in range(self._count)]
        found = [each for each in states if each is not None]
        return found if len(found) == self._count else ()


def _tapped(kind: type, latest: dict[int, mx.array], place: int) -> type:
    """Return a subclass that stores its output in `latest`; of a tuple, the first element."""

    def call(self: Network, *args: object, **named: object) -> object:
        returned = kind.__call__(self, *args, **named)
        latest[place] = returned[0] if isinstance(returned, tuple) else returned
        return returned

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
