"""Keeps garbage collection cheap: a full collection stops every thread for 100 ms."""

import gc


class LastingObjects:
    """Excludes long-lived objects from garbage collection, and includes them again.

    The collector has one set of frozen objects per process. If the embedding program uses it,
    it is left alone, and collections are short anyway.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._is_theirs = False

    def leave_out(self) -> None:
        """Exclude all present objects, apart from garbage."""
        if self._is_free():
            gc.collect()
            gc.freeze()
            self._is_ours = True

    def leave_out_at_once(self) -> None:
        """Exclude all present objects, including garbage: this does not stop any thread."""
        if self._is_free():
            gc.freeze()
            self._is_ours = True

    def collect(self) -> None:
        """Collect all garbage, also among the excluded objects."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False
        gc.collect()

    def _is_free(self) -> bool:
        if not (self._is_ours or self._is_theirs):
            # This counts one object after another.
            self._is_theirs = gc.get_freeze_count() > 0
        return not self._is_theirs


LASTING = LastingObjects()
