"""The server's end of a group: a session whose work other processes do."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.config import ModelOptions
from backend.core.request import GenerationRequest
from backend.core.status import EngineState, EngineStatus
from backend.engine.assembly import Outlets
from backend.engine.command import Cancel, GroupNews, Judge, SideCommand, Submit, answer
from backend.engine.distributed.channel import ChannelClosedError, Outbox
from backend.engine.distributed.families import require_divisible
from backend.engine.distributed.group_processes import GroupProcesses
from backend.engine.distributed.linking import usable_backend
from backend.engine.distributed.messages import (
    Answered,
    Failed,
    Form,
    Job,
    Leave,
    Told,
)
from backend.engine.distributed.topology import Topology
from backend.engine.distributed.wire import WireError
from backend.engine.stream import Publication, is_last
from backend.errors import (
    BackendError,
    GroupLostError,
    UnsupportedError,
)
from backend.model.checkpoint import read_config
from backend.model.loaded import LoadedModel
from backend.model.loader import look

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Who is to compute what."""

    topology: Topology
    options: ModelOptions
    directory: Path


class GroupSession:
    """A model that a group of processes has loaded; belongs to the engine thread.

    A thread listens to the group: it hands over events, and posts the news that concern this
    thread.
    """

    has_ended_aside = False
    is_idle = True
    idle_timeout_s = None

    def __init__(self, model: LoadedModel, group: GroupProcesses, outlets: Outlets) -> None:
        """Take over a group that has loaded its model."""
        self._model = model
        self._group = group
        self._outlets = outlets
        self._status = group.status
        self._open: set[str] = set()
        self._jobs: dict[int, Future[Any]] = {}
        self._job_number = 0
        self._loss: BackendError | None = None
        self._outbox = Outbox(group.channel)
        self._silent_since: float | None = None
        threading.Thread(target=self._listen, name="group", daemon=True).start()

    @property
    def turn_s(self) -> float:
        """How long a group that has something to do has told nothing; any thread may read it."""
        since = self._silent_since
        return 0.0 if since is None or self._loss is not None else time.monotonic() - since

    def plain_model(self) -> LoadedModel:
        """Return the model's facts."""
        return self._model

    def submit(self, request: GenerationRequest) -> None:
        """Have a request queued."""
        self._open.add(request.request_id)
        try:
            self._send(Submit(request))
        except WireError as error:
            self._end_request(request.request_id, UnsupportedError(f"in a group: {error}"))
        if self._loss is not None:
            self._end_request(request.request_id, self._loss)

    def cancel(self, request_id: str) -> None:
        """Have a request dropped."""
        self._open.discard(request_id)
        self._send(Cancel(request_id))

    def work_aside(self, command: SideCommand) -> None:
        """Have work done beside generation."""
        if isinstance(command, Judge):
            answer(command.reply, UnsupportedError("a model on several processes judges no pairs"))
            return
        self._job_number += 1
        number, reply = self._job_number, command.reply
        self._jobs[number] = reply
        self._send(Job(number, command.request))
        # Not before: a reply that was cancelled meanwhile is left at once.
        reply.add_done_callback(lambda _: self._leave(number))
        if self._loss is not None:
            answer(reply, self._loss)

    def take_in(self, news: GroupNews) -> None:
        """Act on what the group has told; its status is there already."""
        if news.source is self and news.loss is not None:
            self._loss = news.loss
            log.error("the group is lost: %s", news.loss)
            self._group.end()
            self.fail_all(news.loss)

    def fail_all(self, error: BackendError) -> None:
        """End every request with an error."""
        for request_id in list(self._open):
            self._end_request(request_id, error)
        for reply in list(self._jobs.values()):
            answer(reply, error)

    def close(self) -> None:
        """End the group's processes."""
        self._outbox.close()
        self._group.end()

    def status(self) -> EngineStatus:
        """Return the latest snapshot of the group."""
        if self._loss is not None:
            return EngineStatus(state=EngineState.ERROR)
        return self._status

    def turn(self) -> None:
        """Do nothing: turns are rank 0's."""

    def rest(self) -> None:
        """Do nothing."""

    def answer_aside(self) -> None:
        """Do nothing: results go out as they come."""

    def recover(self, error: Exception) -> None:
        """Give the group up: what fails here is no request's fault."""
        self.take_in(GroupNews(self, GroupLostError(f"the group cannot be led: {error}")))

    def _send(self, message: object) -> None:
        self._outbox.put(message)
        if self._silent_since is None:
            self._silent_since = time.monotonic()

    def _leave(self, number: int) -> None:
        reply = self._jobs.pop(number)
        if reply.cancelled():
            self._send(Leave(number))

    def _end_request(self, request_id: str, error: BackendError) -> None:
        self._open.discard(request_id)
        self._outlets.hand_over([Publication(request_id, error)])

    def _listen(self) -> None:
        try:
            while True:
                self._receive(self._group.channel.receive())
                self._silent_since = time.monotonic() if self._has_work else None
        except ChannelClosedError:
            if not self._group.has_ended:
                self._outlets.post(GroupNews(self, self._group.loss()))

    @property
    def _has_work(self) -> bool:
        return self._status.state is EngineState.BUSY or bool(self._open or self._jobs)

    def _receive(self, message: object) -> None:
        match message:
            case EngineStatus():
                self._status = message
                self._outlets.post(GroupNews(self))
            case Told(publications):
                for publication in publications:
                    if is_last(publication.event):
                        self._open.discard(publication.request_id)
                self._outlets.hand_over(publications)
            case Answered(job, result):
                if reply := self._jobs.get(job):
                    answer(reply, result)
            case Failed(error):
                self._group.reason = error


def form_group(plan: GroupPlan, outlets: Outlets, *, cancelled: Callable[[], bool]) -> GroupSession:
    """Return a session of a new group that has loaded a model.

    Args:
        plan: Who is to compute what.
        outlets: Where the session puts what it has for others.
        cancelled: Asked while the group forms; true ends it.

    Raises:
        InvalidRequestError: MLX has no such backend here.
        LoadError: The model cannot be divided so, or a rank is missing or has failed.
    """
    directory = plan.directory.resolve()
    # Towers are not divided: the text part of such a model is.
    options = replace(plan.options, tuning=replace(plan.options.tuning, vision=False))
    if options.adapters:
        raise UnsupportedError("LoraAdapters: a model on several processes takes no adapters")
    topology = replace(plan.topology, backend=usable_backend(plan.topology))
    model = look(options, directory)
    require_divisible(model.network, read_config(directory), topology)
    group = GroupProcesses(topology)
    try:
        form = Form(
            topology=topology,
            options=options,
            directory=directory,
            timeout_s=options.tuning.worker_timeout_s,
        )
        formed = group.form(form, cancelled)
    except BaseException:
        group.end()
        raise
    card = replace(
        model.card,
        weights_bytes=formed.status.memory_bytes["weights"],
        batches=formed.card.batches,
        reuses_at_boundaries_only=formed.card.reuses_at_boundaries_only,
    )
    return GroupSession(LoadedModel(model.tokenizer, model.template, card), group, outlets)
