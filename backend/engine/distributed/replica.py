"""One rank's session: it executes turns, and does nothing by itself."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, assert_never

import mlx.core as mx

from backend.cache.layers import cache_leaves
from backend.config import DEFAULT_TUNING, ModelOptions
from backend.core.model import ModelCard, ModelKind
from backend.core.status import EngineStatus
from backend.engine.distributed.messages import (
    Form,
    GroupCommand,
    Ready,
    Report,
    Start,
    Turn,
)
from backend.engine.distributed.shard import exchange
from backend.engine.messages.commands import (
    Cancel,
    Compute,
    Expect,
    Fetched,
    Resize,
    SessionRequest,
    Submit,
)
from backend.engine.messages.protocol import Job, Leave, PrepareMedium
from backend.engine.passes.caches import make_cache_factory
from backend.engine.passes.ranks import Ranks
from backend.engine.rows.memory_budget import kv_budget_bytes, working_set_bytes
from backend.engine.session.assembly import (
    assemble_decoder_session,
    assemble_session,
    prompt_cache_bytes,
)
from backend.engine.session.pace import Pace
from backend.engine.session.session import Outlets, Session
from backend.errors import DeviceLostError
from backend.model.loaded import RunnableModel

CHECK_INTERVAL_TURNS = 32
# More than any memory, and small enough to be multiplied.
_PLENTY = 2**50


class Replica:
    """A session that every rank has; belongs to the main thread of its process."""

    def __init__(self, model: RunnableModel, session: Session) -> None:
        """Take over an idle session of a model; see `alone` and `shared`."""
        self._model = model
        self._session = session
        self._commands: deque[GroupCommand] = deque()
        self._jobs: dict[int, Future[Any]] = {}
        self._ended: deque[int] = deque()

    @classmethod
    def alone(cls, model: RunnableModel, options: ModelOptions, outlets: Outlets) -> "Replica":
        """Return the single replica of a model."""
        return cls(model, assemble_session(model, options, outlets))

    @classmethod
    def shared(
        cls, model: RunnableModel, options: ModelOptions, start: Start, outlets: Outlets
    ) -> "Replica":
        """Return one of several replicas, which all admit and evict the same.

        Args:
            model: This rank's shard.
            options: The options of the LoadModel.
            start: The budgets that the ranks agreed on.
            outlets: Receive the session's output.
        """
        layers = len(make_cache_factory(model.network, DEFAULT_TUNING)())
        tuning = options.tuning.updated(
            max_kv_bytes=start.kv_bytes_per_layer * layers,
            max_cache_bytes=start.cache_bytes_per_layer * layers,
            # Ranks read and write at their own speed: a disk would make them diverge.
            cache_dir=None,
            # They also measure the gain of a draft at their own speed.
            speculation="off",
        )
        agreed = replace(options, tuning=tuning, models_dir=None)
        session = assemble_decoder_session(model, agreed, outlets, Ranks(exchange))
        return cls(model, session)

    @property
    def is_idle(self) -> bool:
        """Whether a turn without commands would compute nothing."""
        return not self._commands and self._session.is_idle

    @property
    def idle_timeout_s(self) -> float | None:
        """How long an idle session may be left without a turn; `None` is forever."""
        return self._session.idle_timeout_s

    @property
    def card(self) -> ModelCard:
        """The facts about the model, seen from this rank."""
        return self._session.card

    def pace(self) -> Pace | None:
        """Return the work that this rank's clock allows in the next turn."""
        return self._session.pace()

    def follow(self, turn: Turn) -> None:
        """Obey the commands of a turn and compute it; passes on the model's errors.

        Commands after one that raises are obeyed in the next turn.
        """
        self._commands.extend(turn.commands)
        while self._commands:
            self._obey(self._commands.popleft())
        self._session.turn(turn.pace)

    def take_results(self) -> Sequence[tuple[int, object]]:
        """Return the results, or errors, of the jobs that ended since the last call."""
        results = []
        while self._ended:
            number = self._ended.popleft()
            reply = self._jobs.pop(number)
            if not reply.cancelled():
                results.append((number, reply.exception() or reply.result()))
        return results

    def recover(self, error: Exception) -> None:
        """Fail the request that made the last turn fail; of several, find out which.

        Raises:
            DeviceLostError: A fresh trial fails too: no request is to blame.
        """
        try:
            self._try_device()
        except Exception as failure:  # noqa: BLE001 (upstream raises anything)
            raise DeviceLostError(f"{error}; then a trial prompt failed: {failure}") from error
        self._session.recover(error)

    def take_in(self, news: Fetched | Resize) -> None:
        """Resume a request that waited for the disk, or apply another budget."""
        self._session.obey(news)

    def close(self) -> None:
        """Write pending nodes to disk, and end."""
        self._session.close()

    def is_checked_after(self, turn: Turn) -> bool:
        """Whether ranks compare their tokens after this turn; all ranks agree on it."""
        return turn.number % CHECK_INTERVAL_TURNS == 0 or self._session.is_idle

    @property
    def checksum(self) -> int:
        """The checksum of all tokens drawn so far."""
        return self._session.checksum

    def report(self, turn_number: int) -> Report:
        """Return the state of this rank."""
        return Report(turn_number, self.checksum, self._session.status())

    def status(self) -> EngineStatus:
        """Return a snapshot."""
        return self._session.status()

    def _try_device(self) -> None:
        """Compute a trial prompt of one token."""
        if self._model.card.kind is ModelKind.DECODER:
            caches = make_cache_factory(self._model.network, DEFAULT_TUNING)()
            mx.eval(self._model.network(mx.array([[0]]), cache=caches))
        mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))

    def _obey(self, command: GroupCommand) -> None:
        match command:
            case Submit() | Cancel() | Expect():
                self._session.obey(command)
            case Job(number, request):
                self._add(number, request)
            case Leave(number):
                if reply := self._jobs.get(number):
                    reply.cancel()
            case _:
                assert_never(command)

    def _add(self, number: int, request: SessionRequest | PrepareMedium) -> None:
        if isinstance(request, PrepareMedium):
            raise AssertionError("media are prepared on a thread of their own")
        reply: Future[Any] = Future()
        self._jobs[number] = reply
        reply.add_done_callback(lambda _: self._ended.append(number))
        self._session.obey(Compute(request, reply))


def readiness(model: RunnableModel, form: Form, rank: int) -> Ready:
    """Return the values that ranks must agree on before they start."""
    tuning = form.options.tuning
    caches = make_cache_factory(model.network, tuning, Ranks(exchange))()
    # Ranks of one machine share its memory, unless each has a GPU.
    sharing = 1 if mx.cuda.is_available() else form.topology.neighbours(rank)
    weights_bytes = model.card.weights_bytes * sharing
    kv_bytes = kv_budget_bytes(form.options, weights_bytes, working_set_bytes())
    if tuning.memory.max_kv_bytes is None:
        kv_bytes //= sharing
    return Ready(
        layers=len(caches),
        cache_kinds=tuple(sorted(_kind(leaf) for leaf in cache_leaves(caches))),
        kv_budget_bytes=kv_bytes,
        cache_budget_bytes=prompt_cache_bytes(tuning, kv_bytes),
    )


def agreement(everyone: Sequence[Ready]) -> Start:
    """Return budgets with which every rank admits and evicts the same.

    Ranks of a pipeline have different layers: with budgets per layer their accounts agree as
    long as all layers are of one kind. Otherwise no prefix is kept, and requests are not
    charged.
    """
    kinds = {kind for ready in everyone for kind in ready.cache_kinds}
    if len(kinds) > 1 and len({ready.cache_kinds for ready in everyone}) > 1:
        return Start(kv_bytes_per_layer=_PLENTY, cache_bytes_per_layer=0)
    return Start(
        kv_bytes_per_layer=min(ready.kv_budget_bytes // ready.layers for ready in everyone),
        cache_bytes_per_layer=min(ready.cache_budget_bytes // ready.layers for ready in everyone),
    )


def _kind(leaf: object) -> str:
    """Return a key that distinguishes caches by the tokens they keep and how they are cut."""
    return f"{type(leaf).__name__}:{getattr(leaf, 'max_size', '')}"
