"""The trials that a load leaves open: they run between requests, until then the safe way goes."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from backend.config import SpeculationOptions
from backend.engine.drafts.drafting import Drafting
from backend.engine.parts import LoopParts
from backend.engine.plan import BatchPlan
from backend.engine.trials.batch_check import Planning

# A loop that has just begun is likely to get a request soon.
DELAY_S = 2.0

log = logging.getLogger(__name__)


class Examination:
    """Finds how rows may be batched, a pass at a time; belongs to the main thread.

    All parts of the loop share one plan, and look at it when rows join. It changes without a change
    of the rows' tokens.

    Attributes:
        is_pending: Whether trials have yet to begin.
        may_refer: Whether stored prefixes can be used in place, once no row has caches.
    """

    def __init__(
        self,
        loop: LoopParts,
        plan: BatchPlan,
        new_drafting: Callable[[], Drafting | None],
        options: SpeculationOptions,
    ) -> None:
        self._make, self._page = loop.resources.trials, loop.resources.page
        self.is_pending = self._make is not None
        self._loop, self._plan, self._new_drafting = loop, plan, new_drafting
        self._knows_drafts = options.speculation != "off"
        self._trials: Planning | None = None
        self.may_refer = self.is_running = self._is_computing = False
        self._seconds = 0.0

    @property
    def wants_turns(self) -> bool:
        """Whether it is time for trials: not before the first request has its reply."""
        return self.is_running or (
            self.is_pending and self._loop.counters.values["generated_tokens"] > 0
        )

    @property
    def may_advance(self) -> bool:
        """Whether a pass may run now: no row runs, or others wait for the result."""
        if self._loop.background.has_begun:
            return False
        return not self._loop.scheduler.slots_taken or bool(self._loop.scheduler.waiting)

    def begin_if_due(self, rested_s: float) -> None:
        """Begin after a request, after a rest, or when requests wait for the result.

        The use of stored prefixes in place may begin as well.

        Args:
            rested_s: For how long there has been nothing to compute, in seconds.
        """
        if self.may_refer and not self._loop.background.has_begun:
            self._refer()
        if not self.is_pending:
            return
        scheduler = self._loop.scheduler
        is_over = scheduler.is_idle and self.wants_turns
        if is_over or rested_s >= DELAY_S or (scheduler.slots_taken and scheduler.waiting):
            self._begin()

    def advance(self) -> None:
        """Compute one pass; passes on the model's errors, see `blame`."""
        if self._trials is None:
            return
        started = time.monotonic()
        self._is_computing = True
        try:
            plan = next(self._trials)
        except StopIteration as end:
            self._end(end.value)
        else:
            if plan is not None:
                self._adopt(plan)
        self._is_computing = False
        self._seconds += time.monotonic() - started

    def blame(self, error: Exception) -> bool:
        """End without a result if a pass of the trials has failed; false if it was another."""
        if not self._is_computing:
            return False
        self._is_computing, self._trials, self.is_running = False, None, False
        self._page.add(begun=0)
        self._page.hand_over()
        log.error("it could not be tried how requests are computed together", exc_info=error)
        return True

    def leave(self) -> None:
        """End because the loop does, which is nobody's fault."""
        if self.is_running:
            self._page.add(begun=self._page.findings.begun - 1)
            self._page.hand_over()

    def _begin(self) -> None:
        self.is_pending = False
        if self._make is None:
            return
        log.info(
            "trying between requests how this model can compute several at once, once for this "
            "checkpoint; until then it computes one at a time, without drafts"
        )
        # An engine that this ends must not be followed by others for ever.
        self._page.add(begun=self._page.findings.begun + 1)
        self._page.hand_over()
        self._trials, self.is_running = self._make(), True

    def _end(self, plan: BatchPlan) -> None:
        self._trials, self.is_running = None, False
        self._adopt(plan)
        self._page.add(plan=plan, knows_drafts=self._knows_drafts, begun=0)
        self._page.hand_over()
        how = "together" if plan.batches else "one at a time"
        drafts = "with" if plan.pass_seconds else "without"
        log.info("requests are computed %s, %s drafts: tried in %.1f s", how, drafts, self._seconds)

    def _adopt(self, found: BatchPlan) -> None:
        """Take over a plan between two turns.

        Rows keep their caches: a single one has those that batches are made from. Stored prefixes
        are used in place only by rows to come, once there are no others: see `_refer`.
        """
        loop, plan, drafted = self._loop, self._plan, bool(self._plan.pass_seconds)
        if plan.batching is not found.batching:
            loop.scheduler.max_active = loop.scheduler.max_slots if found.batches else 1
            loop.memory.reservations.set_own_lengths(found.has_own_lengths)
        self.may_refer = found.shares_prefixes and not plan.shares_prefixes
        plan.become(replace(found, shares_prefixes=plan.shares_prefixes))
        if not drafted and (new := self._new_drafting()):
            loop.batch.begin_drafts(new)
            loop.prefilling.begin_drafts(new)

    def _refer(self) -> None:
        """Have stored prefixes used in place, unless a row has caches."""
        if not self._loop.scheduler.slots_taken and self._loop.batch.is_empty:
            self.may_refer = False
            self._plan.shares_prefixes = True
            self._loop.prefixes.refer()
