"""Rank 0: it decides what every turn does, and all ranks do it.

The main thread computes. One thread listens to the server, one to each other rank. Whatever goes
wrong ends the process, and with it the group: a rank that is missing cannot be replaced.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from backend.core.status import EngineStatus
from backend.engine.distributed.channel import Channel, ChannelClosedError
from backend.engine.distributed.gathering import Member, gather
from backend.engine.distributed.grammars import teach_receiving
from backend.engine.distributed.messages import (
    Answered,
    Failed,
    Form,
    Formed,
    GroupCommand,
    Join,
    Ready,
    Report,
    Told,
    Turn,
)
from backend.engine.distributed.processes import Process, ending
from backend.engine.distributed.replica import Replica, agreement, readiness
from backend.engine.distributed.shard import load_shard, synchronise
from backend.engine.distributed.splitting import pipeline_split
from backend.engine.distributed.token_check import TokenCheck
from backend.engine.distributed.wire import Codec
from backend.engine.stream import Publication, is_last
from backend.errors import BackendError, GroupLostError
from backend.model.loaded import RunnableModel
from backend.model.weights import memory_bytes

STATUS_INTERVAL_S = 0.25
# How long the news of who has gone may take behind the failure that it causes.
_NEWS_DELAY_S = 2.0

log = logging.getLogger(__name__)


class Leader:
    """Rank 0 of one group."""

    def __init__(self, server: Channel, codec: Codec, children: Mapping[int, Process]) -> None:
        """Prepare.

        Args:
            server: Who gives commands and gets events.
            codec: Of all channels; learns grammars when the model is loaded.
            children: The ranks that were started here.
        """
        self._server = server
        self._codec = codec
        self._children = children
        self._members: list[Member] = []
        self._commands: queue.SimpleQueue[GroupCommand] = queue.SimpleQueue()
        self._ready: dict[int, queue.SimpleQueue[Ready]] = defaultdict(queue.SimpleQueue)
        self._reports: queue.SimpleQueue[tuple[int, Report]] = queue.SimpleQueue()
        self._replica: Replica
        self._check: TokenCheck
        self._turn_number = 0
        self._status_due_at = 0.0

    def run(self) -> NoReturn:
        """Form a group and lead it until the server hangs up; never returns."""
        self._server.watch(lambda: os._exit(0))
        try:
            form = self._server.receive()
            self._form(form)
            threading.Thread(target=self._listen_to_server, name="server", daemon=True).start()
            while True:
                self._lead_turn()
        except BackendError as error:
            self._fail(error)
        except Exception as error:
            log.exception("rank 0 failed")
            # If a rank has gone, its thread says so and ends this process first.
            time.sleep(_NEWS_DELAY_S)
            self._fail(GroupLostError(f"rank 0 failed: {error}"))

    def _form(self, form: Form) -> None:
        self._members = gather(form, self._codec, self._children)
        joins = self._invitations(form)
        for member in self._members:
            member.channel.send(joins[member.rank])
            threading.Thread(target=self._listen, args=(member,), daemon=True).start()
        model = load_shard(joins[0])
        self._begin(form, model)
        log.info("a group of %d ranks computes %s", form.topology.size, model.card.name)

    def _begin(self, form: Form, model: RunnableModel) -> None:
        everyone = [readiness(model, form, 0)]
        everyone += [self._ready[member.rank].get() for member in self._members]
        start = agreement(everyone)
        for member in self._members:
            member.channel.send(start)
        synchronise()
        teach_receiving(self._codec, model.tokenizer, model.card)
        self._replica = Replica(model, form.options, start, self._hand_over, self._answer_job)
        self._check = TokenCheck(dict(self._reports.get() for _ in self._members))
        self._server.send(Formed(self._replica.card, self._status()))

    def _invitations(self, form: Form) -> list[Join]:
        memory = [memory_bytes(), *(member.hello.memory_bytes for member in self._members)]
        split = pipeline_split(form, memory)
        return [Join(form=form, rank=rank, split=split) for rank in range(form.topology.size)]

    def _lead_turn(self) -> None:
        """Decide on a turn, tell everyone, and compute it."""
        commands = self._next_commands()
        self._turn_number += 1
        turn = Turn(self._turn_number, commands, self._replica.pace())
        data = self._codec.encode(turn)
        for member in self._members:
            member.channel.send_packed(data)
        self._replica.follow(turn)
        if self._replica.is_checked_after(turn):
            self._check.note(turn.number, self._replica.checksum)
        self._compare()
        if self._replica.is_idle or time.monotonic() >= self._status_due_at:
            self._send_status()

    def _next_commands(self) -> tuple[GroupCommand, ...]:
        """Return the commands that are there; wait for one when there is nothing else to do."""
        commands = [self._commands.get()] if self._replica.is_idle else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return tuple(commands)

    def _compare(self) -> None:
        """Read what other ranks have drawn.

        Raises:
            GroupLostError: One of them has drawn other tokens.
        """
        while not self._reports.empty():
            self._check.compare(*self._reports.get())

    def _hand_over(self, publications: Sequence[Publication]) -> None:
        """Send events to the server, behind a status that knows which requests end."""
        if any(is_last(publication.event) for publication in publications):
            self._send_status()
        self._server.send(Told(tuple(publications)))

    def _answer_job(self, job: int, result: object) -> None:
        self._send_status()
        self._server.send(Answered(job, result))

    def _send_status(self) -> None:
        self._status_due_at = time.monotonic() + STATUS_INTERVAL_S
        self._server.send(self._status())

    def _status(self) -> EngineStatus:
        """Return the status of rank 0, with the memory of every rank."""
        own = self._replica.status()
        memories = {0: own.memory_bytes}
        memories |= {rank: each.memory_bytes for rank, each in self._check.statuses.items()}
        total = Counter[str]()
        for parts in memories.values():
            total.update(parts)
        by_rank = {f"rank_{rank}": _held(parts) for rank, parts in sorted(memories.items())}
        return replace(own, memory_bytes=dict(total) | by_rank)

    def _listen_to_server(self) -> None:
        try:
            while True:
                self._commands.put(self._server.receive())
        except ChannelClosedError:
            os._exit(0)
        except BackendError as error:
            self._fail(error)

    def _listen(self, member: Member) -> None:
        """Take what another rank says; if it fails or hangs up, all is lost."""
        try:
            while True:
                match message := member.channel.receive():
                    case Ready():
                        self._ready[member.rank].put(message)
                    case Report():
                        self._reports.put((member.rank, message))
                    case Failed(error):
                        self._fail(error)
        except ChannelClosedError:
            number = member.hello.process_id
            how = ending(member.process)
            name = f"rank {member.rank} of {len(self._members) + 1} (process {number})"
            self._fail(GroupLostError(f"{name} {how}"))

    def _fail(self, error: BackendError) -> NoReturn:
        """Tell the server why, and end this process; its children end with it."""
        log.error("the group is lost: %s", error)
        with contextlib.suppress(ChannelClosedError):
            self._server.send(Failed(error))
        os._exit(1)


def _held(parts: Mapping[str, int]) -> int:
    return parts["mlx_active"] + parts["mlx_cache"]
