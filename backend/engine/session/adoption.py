"""Changes how the rows of a running session are batched, without a change of their tokens."""

from collections.abc import Callable
from dataclasses import replace

from backend.engine.drafts.drafting import Drafting
from backend.engine.passes.batch import Batch
from backend.engine.plan import BatchPlan
from backend.engine.prefixes.store import PrefixStore
from backend.engine.rows.scheduler import Scheduler
from backend.engine.session.memory_watch import MemoryWatch
from backend.engine.session.prefilling import Prefilling


class Adoption:
    """Gives the parts of a session a plan; belongs to the main thread.

    All of them share one plan, and look at it when rows join.
    """

    def __init__(
        self,
        plan: BatchPlan,
        scheduler: Scheduler,
        memory: MemoryWatch,
        batch: Batch,
        prefilling: Prefilling,
        prefixes: PrefixStore,
    ) -> None:
        """Start with the present plan.

        Args:
            plan: Of the session; it changes.
            scheduler: Limits the rows that decode together.
            memory: Charges rows together.
            batch: Drafts for its rows.
            prefilling: Tells drafts of prompts.
            prefixes: May be used in place.
        """
        self._plan = plan
        self._scheduler = scheduler
        self._memory = memory
        self._batch = batch
        self._prefilling = prefilling
        self._prefixes = prefixes
        self._may_refer = False

    def adopt(self, found: BatchPlan, drafting: Callable[[], Drafting | None]) -> None:
        """Take over a plan between two turns.

        Rows keep their caches: a single one has those that batches are made from. Stored prefixes
        are used in place only by rows to come, once there are no others.

        Args:
            found: The new plan.
            drafting: Returns the drafting of the plan, if it drafts.
        """
        plan, drafted = self._plan, bool(self._plan.pass_seconds)
        if plan.batching is not found.batching:
            self._scheduler.max_active = self._scheduler.max_slots if found.batches else 1
            self._memory.set_own_lengths(found.has_own_lengths)
        self._may_refer = found.shares_prefixes and not plan.shares_prefixes
        plan.become(replace(found, shares_prefixes=plan.shares_prefixes))
        if not drafted and (new := drafting()):
            self._batch.begin_drafts(new)
            self._prefilling.begin_drafts(new)

    def refer(self) -> None:
        """Have stored prefixes used in place if that is due and no row has caches."""
        if self._may_refer and not self._scheduler.slots_taken and self._batch.is_empty:
            self._may_refer = False
            self._plan.shares_prefixes = True
            self._prefixes.refer()
