"""The lost processes of a model: their counts, and the restarts."""

from collections import deque
from dataclasses import replace

from backend.core.metric_table import added, counters_of
from backend.core.status import EngineStatus, Restart

_KEPT_RESTARTS = 16


class Losses:
    """Counts since the load of a model."""

    def __init__(self) -> None:
        self._lost = added([])
        self._restarts: deque[Restart] = deque(maxlen=_KEPT_RESTARTS)

    def count(self, lost: EngineStatus) -> None:
        """Keep the counts of a lost process."""
        self._lost = added([self._lost, counters_of(lost.metrics)])

    def note_restart(self, reason: BaseException, lost_s: float) -> None:
        """Record that another process has the model, and the time that took."""
        self._lost = added([self._lost, {"restarts": 1, "lost_s": lost_s}])
        self._restarts.append(Restart(reason=str(reason), lost_s=lost_s))

    def added_to(self, status: EngineStatus) -> EngineStatus:
        """Return the status of the present process with the counts of all of them."""
        return replace(
            status,
            metrics=added([status.metrics, self._lost]),
            latest_restarts=tuple(self._restarts),
        )
