"""One rank's session: it does what a turn says, and nothing by itself."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeAlias, assert_never

import mlx.core as mx

from backend.cache.layout import cache_leaves
from backend.config import ModelOptions
from backend.core.embedding import EmbeddingRequest
from backend.core.model import ModelCard
from backend.core.scoring import ScoreRequest
from backend.core.status import EngineStatus
from backend.engine.assembly import Outlets, assemble_decoder_session, prompt_cache_bytes
from backend.engine.caches import make_cache_factory
from backend.engine.command import Cancel, Embed, Score, Submit
from backend.engine.distributed.messages import (
    Form,
    GroupCommand,
    Job,
    Leave,
    Ready,
    Report,
    Start,
    Turn,
)
from backend.engine.memory_budget import kv_budget_bytes, working_set_bytes
from backend.engine.pace import Pace
from backend.engine.publisher import HandOver
from backend.model.loaded import RunnableModel

CHECK_INTERVAL_TURNS = 32
# More than there is, and a number that can still be multiplied.
_PLENTY = 2**50

AnswerJob: TypeAlias = Callable[[int, object], None]
"""Takes what a job gave, or the error that ended it."""


class Replica:
    """A session that every rank has; belongs to the main thread of its process."""

    def __init__(
        self,
        model: RunnableModel,
        options: ModelOptions,
        start: Start,
        hand_over: HandOver,
        answer_job: AnswerJob,
    ) -> None:
        """Start idle.

        Args:
            model: This rank's shard.
            options: What the LoadModel asked for.
            start: What the ranks agreed on.
            hand_over: Takes the events of all requests, in order.
            answer_job: Takes what jobs give.
        """
        layers = len(make_cache_factory(model.network, options.tuning)())
        tuning = replace(
            options.tuning,
            max_kv_bytes=start.kv_bytes_per_layer * layers,
            max_cache_bytes=start.cache_bytes_per_layer * layers,
            # Ranks read and write at their own speed: what is on disk would part them.
            cache_dir=None,
        )
        agreed = replace(options, tuning=tuning, models_dir=None)
        self._session = assemble_decoder_session(model, agreed, Outlets(hand_over, _refuse))
        self._answer_job = answer_job
        self._jobs: dict[int, Future[Any]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether a turn without commands would do nothing."""
        return self._session.is_idle

    @property
    def card(self) -> ModelCard:
        """What is known of the model, seen from this rank."""
        return self._session.plain_model().card

    def pace(self) -> Pace:
        """Return what this rank's clock allows the next turn."""
        return self._session.pace()

    def follow(self, turn: Turn) -> None:
        """Obey the commands of a turn and compute it; raises what the model raises."""
        for command in turn.commands:
            self._obey(command)
        self._session.turn(turn.pace)
        self._session.answer_aside()

    def is_checked_after(self, turn: Turn) -> bool:
        """Whether ranks compare their tokens behind this turn: they all say the same."""
        return turn.number % CHECK_INTERVAL_TURNS == 0 or self._session.is_idle

    @property
    def checksum(self) -> int:
        """Sums up all tokens drawn so far."""
        return self._session.checksum

    def report(self, turn_number: int) -> Report:
        """Return how this rank is doing."""
        return Report(turn_number, self.checksum, self._session.status())

    def status(self) -> EngineStatus:
        """Return a snapshot."""
        return self._session.status()

    def _obey(self, command: GroupCommand) -> None:
        match command:
            case Submit(request):
                self._session.submit(request)
            case Cancel(request_id):
                self._session.cancel(request_id)
            case Job(number, request):
                self._add(number, request)
            case Leave(number):
                if reply := self._jobs.get(number):
                    reply.cancel()
            case _:
                assert_never(command)

    def _add(self, number: int, request: ScoreRequest | EmbeddingRequest) -> None:
        reply: Future[Any] = Future()
        self._jobs[number] = reply
        reply.add_done_callback(lambda _: self._finish(number))
        match request:
            case ScoreRequest():
                self._session.work_aside(Score(request, reply))
            case EmbeddingRequest():
                self._session.work_aside(Embed(request, reply))
            case _:
                assert_never(request)

    def _finish(self, number: int) -> None:
        reply = self._jobs.pop(number)
        if not reply.cancelled():
            self._answer_job(number, reply.exception() or reply.result())


def readiness(model: RunnableModel, form: Form, rank: int) -> Ready:
    """Return what a rank has to agree on with the others before they begin."""
    tuning = form.options.tuning
    caches = make_cache_factory(model.network, tuning)()
    # Ranks of one machine share its memory, unless each has a GPU.
    sharing = 1 if mx.cuda.is_available() else form.topology.neighbours(rank)
    weights_bytes = model.card.weights_bytes * sharing
    kv_bytes = kv_budget_bytes(form.options, weights_bytes, working_set_bytes())
    if tuning.max_kv_bytes is None:
        kv_bytes //= sharing
    return Ready(
        layers=len(caches),
        cache_kinds=tuple(sorted(_kind(leaf) for leaf in cache_leaves(caches))),
        kv_budget_bytes=kv_bytes,
        cache_budget_bytes=prompt_cache_bytes(tuning, kv_bytes),
    )


def agreement(everyone: Sequence[Ready]) -> Start:
    """Return budgets with which every rank admits and evicts the same.

    Ranks of a pipeline have layers of their own: with budgets per layer their books agree as
    long as all layers are of one kind. Where they are not, no prefix is kept, and requests are
    not weighed.
    """
    kinds = {kind for ready in everyone for kind in ready.cache_kinds}
    if len(kinds) > 1 and len({ready.cache_kinds for ready in everyone}) > 1:
        return Start(kv_bytes_per_layer=_PLENTY, cache_bytes_per_layer=0)
    return Start(
        kv_bytes_per_layer=min(ready.kv_budget_bytes // ready.layers for ready in everyone),
        cache_bytes_per_layer=min(ready.cache_budget_bytes // ready.layers for ready in everyone),
    )


def _kind(leaf: object) -> str:
    """Return what tells a cache that keeps other tokens, or is cut in another way."""
    return f"{type(leaf).__name__}:{getattr(leaf, 'max_size', '')}"


def _refuse(news: object) -> None:
    raise AssertionError(f"a rank has no disk that could tell {news!r}")
