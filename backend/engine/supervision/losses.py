"""The lost processes of a model: their counts, and the restarts."""

from collections import Counter, deque
from dataclasses import replace

from backend.core.status import EngineStatus, Restart

_KEPT_RESTARTS = 16


class Losses:
    """Counts since the load of a model."""

    def __init__(self) -> None:
        self._lost = EngineStatus()
        self._restarts: deque[Restart] = deque(maxlen=_KEPT_RESTARTS)
        self._restart_count = 0
        self._lost_s = 0.0

    def count(self, lost: EngineStatus) -> None:
        """Keep the counts of a lost process."""
        self._lost = _counted_on(self._lost, lost)

    def note_restart(self, reason: BaseException, lost_s: float) -> None:
        """Record that another process has the model, and the time that took."""
        self._restart_count += 1
        self._lost_s += lost_s
        self._restarts.append(Restart(reason=str(reason), lost_s=lost_s))

    def added_to(self, status: EngineStatus) -> EngineStatus:
        """Return the status of the present process with the counts of all of them."""
        return replace(
            _counted_on(status, self._lost),
            restarts=self._restart_count,
            latest_restarts=tuple(self._restarts),
            lost_s=self._lost_s,
        )


def _counted_on(status: EngineStatus, earlier: EngineStatus) -> EngineStatus:
    """Return a status whose counts continue from those of another."""
    cache, stored = status.prompt_cache, earlier.prompt_cache
    disk = replace(
        cache.disk,
        read_tokens=cache.disk.read_tokens + stored.disk.read_tokens,
        written_bytes=cache.disk.written_bytes + stored.disk.written_bytes,
        damaged=cache.disk.damaged + stored.disk.damaged,
        dropped=cache.disk.dropped + stored.disk.dropped,
    )
    return replace(
        status,
        prompt_tokens=status.prompt_tokens + earlier.prompt_tokens,
        generated_tokens=status.generated_tokens + earlier.generated_tokens,
        drafted_tokens=status.drafted_tokens + earlier.drafted_tokens,
        accepted_tokens=status.accepted_tokens + earlier.accepted_tokens,
        media_encoded=status.media_encoded + earlier.media_encoded,
        prompt_cache=replace(
            cache,
            looked_up_tokens=cache.looked_up_tokens + stored.looked_up_tokens,
            hit_tokens=cache.hit_tokens + stored.hit_tokens,
            hits=dict(Counter(cache.hits) + Counter(stored.hits)),
            evictions=cache.evictions + stored.evictions,
            disk=disk,
        ),
    )
