"""The decoding of a session: rows join the batch, and their tokens are published."""

from backend.engine.passes.batch import Batch
from backend.engine.rows.scheduler import Scheduler
from backend.engine.session.delivery import Delivery
from backend.engine.session.memory_watch import MemoryWatch
from backend.engine.session.open_requests import OpenRequests
from backend.engine.session.recovery import Recovery
from backend.errors import GrammarError
from backend.model.device import DEVICE, Threads


class Decoding:
    """Steps of the batch, and their tokens; belongs to the main thread."""

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler,
        memory: MemoryWatch,
        requests: OpenRequests,
        recovery: Recovery,
        delivery: Delivery,
    ) -> None:
        """Create the decoding.

        Args:
            batch: Computes the steps.
            scheduler: Knows which rows decode.
            memory: Ensures room for the next token of each.
            requests: Takes the caches of leaving rows, and fails those at a dead end.
            recovery: Told the rows of each step.
            delivery: Receives the tokens.
        """
        self._batch = batch
        self._scheduler = scheduler
        self._memory = memory
        self._requests = requests
        self._recovery = recovery
        self._delivery = delivery
        self._threads: Threads | None = None

    def adapt(self, threads: Threads | None) -> None:
        """Choose the threads of matrix products, if given, by the time of steps from now on."""
        self._threads = threads
        if threads is not None:
            self._batch.note_step = threads.observe

    def join(self) -> None:
        """Let rows whose prompt is computed join the batch."""
        for row in self._scheduler.activate():
            self._batch.add(row)
            if row.drawn == 0:
                self._delivery.announce(row)

    def step(self) -> None:
        """Compute a step, and publish the tokens of the previous one."""
        if self._threads is not None and self._threads.wants_change:
            self.deliver()
            self._threads.change()
        # A first token would wait for the second.
        if DEVICE.blocks_dispatch and self._batch.awaits_first_token:
            self.deliver()
        self._memory.before_step()
        self._recovery.rows = tuple(self._scheduler.active)
        self._batch.step(meanwhile=self.settle, landed=self._delivery.publish)
        # A last token must not wait for the copy into the prompt cache.
        self._delivery.hurry()
        for row, problem in self._batch.astray():
            error = GrammarError(f"cannot be followed any further: {problem}")
            self._requests.fail(row, error)
        for row in self._batch.departed():
            self._requests.store_caches(row)
            self._memory.put_back(row)
        self._recovery.acquit()

    def deliver(self) -> None:
        """Publish the tokens in flight at once, before anything else is computed."""
        self.land()
        self._delivery.flush()

    def land(self) -> None:
        """Read the tokens in flight."""
        self._recovery.rows = tuple(self._scheduler.active)
        self._delivery.publish(self._batch.land())

    def settle(self) -> None:
        """Hand over the due tokens; called while the device computes."""
        self._delivery.settle(len(self._scheduler.active))
