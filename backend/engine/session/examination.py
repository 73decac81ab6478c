"""The trials that a load leaves open: they run between requests, until then the safe way goes."""

import logging
import time
from collections.abc import Callable

from backend.engine.findings import Page
from backend.engine.plan import BatchPlan
from backend.engine.trials.batch_check import Planning

# A session that has just been loaded is likely to get a request soon.
DELAY_S = 2.0

log = logging.getLogger(__name__)


class Examination:
    """Finds how rows may be batched, a pass at a time; belongs to the main thread.

    Attributes:
        is_pending: Whether it has yet to begin.
    """

    def __init__(
        self,
        make: Callable[[], Planning] | None,
        page: Page,
        *,
        adopt: Callable[[BatchPlan], None],
        knows_drafts: bool,
    ) -> None:
        """Create an examination; see `begin`.

        Args:
            make: Returns the trials; `None` if nothing is open.
            page: Gets the result.
            adopt: Changes the session to a plan.
            knows_drafts: Whether they find out about drafts too.
        """
        self.is_pending = make is not None
        self._make = make
        self._page = page
        self._adopt = adopt
        self._knows_drafts = knows_drafts
        self._trials: Planning | None = None
        self._is_computing = False
        self._seconds = 0.0

    @property
    def is_running(self) -> bool:
        """Whether there are passes to compute."""
        return self._trials is not None

    def begin(self) -> None:
        """Begin, unless that was done before."""
        if not self.is_pending or self._make is None:
            return
        self.is_pending = False
        log.info(
            "between requests it is now tried how those of this model can be computed together, "
            "once for this checkpoint; until then it is one at a time, without drafts"
        )
        # An engine that this ends must not be followed by others for ever.
        self._page.add(begun=self._page.findings.begun + 1)
        self._page.hand_over()
        self._trials = self._make()

    def advance(self) -> None:
        """Compute one pass; passes on the model's errors, see `fail`."""
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
        self._is_computing, self._trials = False, None
        self._page.add(begun=0)
        self._page.hand_over()
        log.error("it could not be tried how requests are computed together", exc_info=error)
        return True

    def leave(self) -> None:
        """End because the session does, which is nobody's fault."""
        if self.is_running:
            self._page.add(begun=self._page.findings.begun - 1)
            self._page.hand_over()

    def _end(self, plan: BatchPlan) -> None:
        self._trials = None
        self._adopt(plan)
        self._page.add(plan=plan, knows_drafts=self._knows_drafts, begun=0)
        self._page.hand_over()
        how = "together" if plan.batches else "one at a time"
        drafts = "with" if plan.pass_seconds else "without"
        log.info("requests are computed %s, %s drafts: tried in %.1f s", how, drafts, self._seconds)
