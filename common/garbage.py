"""The garbage collector's share of work: a full collection stops every thread for 100 ms."""

import gc


class LastingObjects:
    """Leaves out of collections what lasts, and takes it in again.

    The collector has one set of such objects for the whole process. Where the program around
    has put its own there, that stays as it is, and collections are short anyway.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def leave_out(self) -> None:
        """Leave out what is there now, apart from garbage."""
        if self._is_ours or not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_ours = True

    def collect(self) -> None:
        """Collect all garbage, also of what was left out."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False
        gc.collect()


LASTING = LastingObjects()
