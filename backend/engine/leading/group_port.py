"""The port of rank 0 of several: all ranks get its commands, and the pace of its clock."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import mlx.core as mx

from backend.core.engine_status import EngineStatus
from backend.engine.distributed.gathering import CHECK_INTERVAL_TURNS, Form, GroupCommand, Turn
from backend.engine.distributed.linking import assemble_shared_loop
from backend.engine.distributed.members import Members, form_group
from backend.engine.distributed.topology import Topology
from backend.engine.leading.server_port import MachineShare, ServerPort
from backend.engine.loop import EngineLoop
from backend.engine.messages.codec import Channel
from backend.engine.messages.protocol import Cancel, Expect, Job, Leave, Submit
from backend.engine.port import Command, Pace, Reportable
from backend.model.checkpoint.weights import memory_bytes
from backend.model.loaded import RunnableModel


class GroupPort(ServerPort):
    """Broadcasts each turn before it is computed, and compares the drawn tokens."""

    is_shared = True

    def __init__(self, server: Channel, share: MachineShare, members: Members) -> None:
        super().__init__(server, share)
        self._members = members
        self._latest = Turn(0, (), None)
        self._received: Sequence[GroupCommand] = ()

    def receive(self, *, waits: bool, timeout_s: float | None) -> Sequence[Command]:  # noqa: ARG002
        """Return the commands that have arrived; an idle group waits for one."""
        received = super().receive(waits=waits, timeout_s=None)
        self._received = [
            command
            for command in received
            if isinstance(command, Submit | Cancel | Expect | Job | Leave)
        ]
        return received

    def agree(self, pace: Pace | None) -> Pace | None:
        """Send the other ranks the turn, with the pace of this rank's clock."""
        self._latest = Turn(self._latest.number + 1, tuple(self._received), pace)
        self._members.send(self._latest)
        return pace

    def report(self, loop: Reportable, *, is_idle: bool) -> None:
        """Compare the tokens of all ranks from time to time, and send a status."""
        is_checked = self._latest.number % CHECK_INTERVAL_TURNS == 0 or is_idle
        checksum = loop.counters.checksum if is_checked else None
        self._members.check(self._latest.number, checksum)
        super().report(loop, is_idle=is_idle)

    def status(self, loop: Reportable) -> EngineStatus:
        """Return the status of rank 0, with the memory of every rank."""
        own = super().status(loop)
        memories = {0: own.memory_bytes, **self._members.memories()}
        total = Counter[str]()
        for parts in memories.values():
            total.update(parts)
        by_rank = {
            f"rank_{rank}": parts["mlx_active"] + parts["mlx_cache"]
            for rank, parts in sorted(memories.items())
        }
        return replace(own, memory_bytes=dict(total) | by_rank)


def join_group(
    form: Form, server: Channel, share: MachineShare, fail: Callable[[BaseException], NoReturn]
) -> tuple[RunnableModel, EngineLoop, GroupPort]:
    """Form a group, load its shards, and return rank 0's shard, loop and port."""
    members, model, start = form_group(form, fail)
    port = GroupPort(server, share, members)
    loop = assemble_shared_loop(model, members.form.options, start, port)
    members.begin()
    share.begin_fixed(_held_by_group(loop.status(), form.topology))
    return model, loop, port


def _held_by_group(status: EngineStatus, topology: Topology) -> int:
    """Return the memory of the ranks on this machine, or of this one if each has a GPU."""
    parts: Mapping[str, int] = status.memory_bytes
    ranks = 1 if mx.cuda.is_available() else topology.neighbours(0)
    return ranks * (parts["weights"] + min(parts["kv_budget"], memory_bytes()))
