"""The lost processes of a model: their counts, and the restarts that made up for them."""

from collections import deque
from dataclasses import replace

from backend.core.status import EngineStatus, Restart

_KEPT_RESTARTS = 16


class Losses:
    """Counts from the load of a model on."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._media_encoded = 0
        self._restarts: deque[Restart] = deque(maxlen=_KEPT_RESTARTS)
        self._restart_count = 0
        self._lost_s = 0.0

    def count(self, lost: EngineStatus) -> None:
        """Keep the counts of a process that has gone."""
        self._prompt_tokens += lost.prompt_tokens
        self._generated_tokens += lost.generated_tokens
        self._media_encoded += lost.media_encoded

    def note_restart(self, reason: BaseException, lost_s: float) -> None:
        """Note that another process has the model, and how long that took."""
        self._restart_count += 1
        self._lost_s += lost_s
        self._restarts.append(Restart(reason=str(reason), lost_s=lost_s))

    def added_to(self, status: EngineStatus) -> EngineStatus:
        """Return the status of the present process as that of all of them."""
        return replace(
            status,
            prompt_tokens=status.prompt_tokens + self._prompt_tokens,
            generated_tokens=status.generated_tokens + self._generated_tokens,
            media_encoded=status.media_encoded + self._media_encoded,
            restarts=self._restart_count,
            latest_restarts=tuple(self._restarts),
            lost_s=self._lost_s,
        )
