"""What a session has done so far, and what it tells of itself."""

from dataclasses import dataclass, field
from zlib import crc32

import mlx.core as mx

from backend.core.status import EngineState, EngineStatus
from backend.engine.batch import Batch
from backend.engine.keeper import Keeper
from backend.engine.media_memo import MediaMemo
from backend.engine.memory_watch import MemoryWatch
from backend.engine.pacing import RateMeter
from backend.engine.scheduler import Scheduler
from backend.engine.side_jobs import SideJobs


@dataclass(slots=True)
class Tally:
    """Counts from the start of the session.

    Attributes:
        prompt_tokens: Prefilled.
        generated_tokens: Drawn and read.
        checksum: Sums up the drawn tokens, in their order.
        rate: Of generated tokens.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    checksum: int = 0
    rate: RateMeter = field(default_factory=RateMeter)

    def count(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated_tokens += 1
        self.checksum = crc32(token_id.to_bytes(4, "big"), self.checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """All that a session's status is made of; belongs to the engine thread.

    Attributes:
        tally: Its counts.
        scheduler: Who waits and who runs.
        batch: The caches of those who decode.
        memory: What is reserved.
        keeper: What is stored.
        side_jobs: What is computed between steps.
        media: What towers have made; `None` for a model without.
        weights_bytes: Of the model.
    """

    tally: Tally
    scheduler: Scheduler
    batch: Batch
    memory: MemoryWatch
    keeper: Keeper
    side_jobs: SideJobs
    media: MediaMemo | None
    weights_bytes: int

    def status(self) -> EngineStatus:
        """Return a snapshot."""
        rows = self.scheduler.rows()
        kv_bytes = self.batch.cache_bytes() + sum(row.cache_bytes() for row in rows)
        prompt_cache = self.keeper.status()
        # A pass may still be in flight for a request that has ended: nobody waits for it.
        is_ready = not rows and not self.side_jobs.is_computing
        generated_tokens = self.tally.generated_tokens
        return EngineStatus(
            state=EngineState.READY if is_ready else EngineState.BUSY,
            memory_bytes={
                "weights": self.weights_bytes,
                "kv_active": kv_bytes,
                **self.memory.status(),
                "prompt_cache": prompt_cache.bytes,
                "media": self.media.nbytes if self.media else 0,
                "mlx_active": mx.get_active_memory(),
                "mlx_cache": mx.get_cache_memory(),
                "mlx_peak": mx.get_peak_memory(),
            },
            slots_taken=self.scheduler.slots_taken,
            waiting=self.scheduler.waiting_count + self.side_jobs.count,
            prompt_tokens=self.tally.prompt_tokens + self.side_jobs.computed_tokens,
            generated_tokens=generated_tokens,
            media_encoded=self.media.runs if self.media else 0,
            tokens_per_s=0.0 if is_ready else self.tally.rate.of_late(generated_tokens),
            prompt_cache=prompt_cache,
            requests=tuple(
                row.status(phase) for phase, rows in self.scheduler.phases().items() for row in rows
            ),
        )
