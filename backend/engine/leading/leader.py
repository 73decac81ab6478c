"""Rank 0, the engine process: it decides on every turn, and all ranks execute it.

The main thread computes. One thread listens to the server, one to each other rank, one compiles
grammars and one prepares media. An unrecoverable error ends the process, and with it
the group: the server starts another.
"""

import contextlib
import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import mlx.core as mx

from backend.core.status import EngineStatus
from backend.engine.distributed.members import NEWS_DELAY_S, Members, form_group
from backend.engine.distributed.messages import Form, GroupCommand, Turn
from backend.engine.distributed.replica import Replica
from backend.engine.distributed.shard import load_whole
from backend.engine.distributed.topology import Topology, topology_of
from backend.engine.findings import Notebook
from backend.engine.grammars.pool import GrammarPool
from backend.engine.grammars.workshop import GrammarWorkshop
from backend.engine.leading.intake import Command, Intake
from backend.engine.leading.machine_share import MachineShare
from backend.engine.messages.channel import Channel, ChannelClosedError
from backend.engine.messages.codec import Codec
from backend.engine.messages.commands import DiskChanged, Fetched, Resize
from backend.engine.messages.failure import Failure
from backend.engine.messages.protocol import (
    Answered,
    Compiling,
    Failed,
    Found,
    Load,
    Loaded,
    MediaFacts,
    Passing,
    Snapshot,
    Stop,
    Told,
)
from backend.engine.messages.results import packed
from backend.engine.messages.stream import Publication
from backend.engine.session.session import Outlets
from backend.errors import BackendError, GroupLostError
from backend.model.checkpoint.weights import memory_bytes
from backend.model.loaded import RunnableModel
from backend.model.loader import tokenizer_defaults
from common.memory.garbage import LASTING
from common.process.lifecycle import exit_at_once

STATUS_INTERVAL_S = 0.25

log = logging.getLogger(__name__)


class Leader:
    """The engine of one model, alone or with other ranks."""

    def __init__(
        self,
        server: Channel,
        codec: Codec,
        tamper: Callable[[RunnableModel], RunnableModel] | None = None,
    ) -> None:
        """Create a leader; see `run`.

        Args:
            server: Sends orders and receives events.
            codec: Of that connection; learns grammars when the model is loaded.
            tamper: Changes a freshly loaded model; for tests.
        """
        self._server = server
        self._codec = codec
        self._tamper = tamper
        self._members: Members | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._replica: Replica
        self._turn_number = 0
        self._status_due_at = 0.0
        self._passing: Passing | None = None
        self._is_stopping = False
        self._share = MachineShare()

    def run(self) -> NoReturn:
        """Load a model and compute until told to stop; never returns."""
        self._server.watch(lambda: os._exit(0))
        try:
            order = self._server.receive()
            if isinstance(order, Load):
                self._begin(order)
                while not self._is_stopping:
                    self._lead_turn()
                self._replica.close()
                self._share.leave()
        except ChannelClosedError:
            pass
        except BackendError as error:
            self._fail(error)
        except BaseException as error:  # the top of the process: models raise even SystemExit
            log.critical("the engine has failed", exc_info=error)
            if self._members is not None:
                # If a rank is gone, its thread reports it and ends this process first.
                time.sleep(NEWS_DELAY_S)
                self._fail(GroupLostError(f"rank 0 failed: {error}"))
            self._fail(error)
        exit_at_once(0)

    def _begin(self, load: Load) -> None:
        outlets = Outlets(
            self._hand_over,
            self._commands.put,
            note_pass=self._note_pass,
            make_room=self._share.make_room,
            notebook=Notebook(load.known, lambda *found: self._server.send(Found(*found))),
        )
        load = self._share.join(load)
        topology = topology_of(load.options.tuning)
        if topology is None:
            make_room = self._share.make_room
            model = self._tampered(load_whole(load.options, load.directory, make_room))
            self._replica = Replica.alone(model, load.options, outlets)
            status, has_media = self._replica.status(), model.media is not None
            self._share.begin(status, self._commands.put, has_media=has_media)
        else:
            form = _form(load, topology)
            self._members, model, start = form_group(form, self._fail)
            options = self._members.form.options
            model = self._tampered(model)
            self._replica = Replica.shared(model, options, start, outlets)
            self._members.begin()
            self._share.begin_fixed(_held_by_group(self._replica.status(), topology))
        self._serve(model)

    def _tampered(self, model: RunnableModel) -> RunnableModel:
        return self._tamper(model) if self._tamper is not None else model

    def _serve(self, model: RunnableModel) -> None:
        """Tell the server that the model is loaded, and start listening to it."""
        grammars = GrammarPool(
            GrammarWorkshop(model.tokenizer, model.card),
            lambda names: self._server.send(Compiling(names)),
        )
        status = self._status()
        card = self._replica.card
        if self._members is not None:
            card = replace(card, weights_bytes=status.memory_bytes["weights"])
        self._server.send(
            Loaded(
                card=card,
                status=status,
                tokenizer_defaults=tokenizer_defaults(model.network),
                media=_media_facts(model),
            )
        )
        Intake(self._server, model.media, grammars, self._commands, self._fail).start()
        grammars.start()
        # Without a collection, which would delay the first token.
        LASTING.leave_out_at_once()

    def _lead_turn(self) -> None:
        """Decide on a turn, send it to all ranks, and compute it."""
        commands = self._next_commands()
        self._turn_number += 1
        turn = Turn(self._turn_number, commands, self._replica.pace())
        if self._members is None:
            self._compute_alone(turn)
        else:
            self._members.send(turn)
            self._replica.follow(turn)
            self._members.check(turn, self._replica)
        self._tell_results()

    def _tell_results(self) -> None:
        results = self._replica.take_results()
        if results or self._replica.is_idle or time.monotonic() >= self._status_due_at:
            # First, because it knows which jobs have ended.
            self._send_status()
        for number, result in results:
            self._server.send(Answered(number, packed(result)))

    def _compute_alone(self, turn: Turn) -> None:
        try:
            self._replica.follow(turn)
        except Exception as error:  # noqa: BLE001 (models raise anything)
            self._replica.recover(error)

    def _next_commands(self) -> tuple[GroupCommand, ...]:
        """Return the queued commands; wait for one if there is nothing else to do."""
        commands: list[GroupCommand] = []
        waits = self._replica.is_idle
        timeout_s = self._replica.idle_timeout_s if self._members is None else None
        while not self._is_stopping:
            try:
                command = self._commands.get(block=waits, timeout=timeout_s)
            except queue.Empty:
                break
            match command:
                case DiskChanged():
                    self._send_status()
                    continue
                case Fetched():
                    self._replica.take_in(command)
                case Resize():
                    self._replica.take_in(command)
                    self._share.answer(command)
                case Stop():
                    self._is_stopping = True
                case Publication():
                    self._hand_over([command])
                case _:
                    commands.append(command)
            waits = False
        return tuple(commands)

    def _hand_over(self, publications: Sequence[Publication]) -> None:
        """Send events to the server, after a status that includes the ends of requests."""
        if any(publication.is_last for publication in publications):
            self._send_status()
        self._server.send(Told(publications))

    def _note_pass(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
        passing = Passing(request_ids, has_job)
        if passing != self._passing:
            self._passing = passing
            self._server.send(passing)

    def _send_status(self) -> None:
        self._status_due_at = time.monotonic() + STATUS_INTERVAL_S
        self._server.send(Snapshot(self._status()))

    def _status(self) -> EngineStatus:
        """Return the status of rank 0, with the memory of every rank if there are several."""
        own = self._share.note(self._replica.status())
        if self._members is None:
            return own
        memories = {0: own.memory_bytes, **self._members.memories()}
        total = Counter[str]()
        for parts in memories.values():
            total.update(parts)
        by_rank = {f"rank_{rank}": _held(parts) for rank, parts in sorted(memories.items())}
        return replace(own, memory_bytes=dict(total) | by_rank)

    def _fail(self, error: BaseException) -> NoReturn:
        """Report the error to the server, and end this process with its children."""
        with contextlib.suppress(ChannelClosedError):
            self._server.send(Failed(Failure.of(error)))
        exit_at_once(1)


def _form(load: Load, topology: Topology) -> Form:
    return Form(
        topology=topology,
        options=load.options,
        directory=load.directory,
        timeout_s=load.options.tuning.group.worker_timeout_s,
    )


def _held_by_group(status: EngineStatus, topology: Topology) -> int:
    """Return the memory of the ranks on this machine, or of this one if each has a GPU."""
    parts = status.memory_bytes
    ranks = 1 if mx.cuda.is_available() else topology.neighbours(0)
    return ranks * (parts["weights"] + min(parts["kv_budget"], memory_bytes()))


def _held(parts: Mapping[str, int]) -> int:
    return parts["mlx_active"] + parts["mlx_cache"]


def _media_facts(model: RunnableModel) -> MediaFacts | None:
    media = model.media
    if media is None:
        return None
    return MediaFacts(
        snippets=media.snippets, takes_parts=media.takes_parts, sampling_rate=media.sampling_rate
    )
