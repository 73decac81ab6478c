"""Keeps garbage collection cheap: a full collection stops every thread for 100 ms."""

import gc


class LastingObjects:
    """Excludes long-lived objects from garbage collection, and includes them again.

    The collector has one set of frozen objects per process. If the embedding program uses it,
    it is left alone, and collections are short anyway.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def leave_out(self) -> None:
        """Exclude all present objects, apart from garbage."""
        if self._is_ours or not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_ours = True

    def leave_out_at_once(self) -> None:
        """Exclude all present objects, including garbage: this does not stop any thread."""
        if self._is_ours or not gc.get_freeze_count():
            gc.freeze()
            self._is_ours = True

    def collect(self) -> None:
        """Collect all garbage, also among the excluded objects."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False
        gc.collect()


LASTING = LastingObjects()
