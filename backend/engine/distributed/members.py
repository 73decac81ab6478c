"""The other ranks, seen from rank 0: gathered once, told every turn, compared regularly."""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from backend.core.status import EngineStatus
from backend.engine.distributed.budgets import agreement, readiness
from backend.engine.distributed.families import pipeline_split, require_divisible
from backend.engine.distributed.gathering import Member, gather
from backend.engine.distributed.linking import load_shard, synchronise, usable_backend
from backend.engine.distributed.messages import Form, Join, Ready, Report, Start, Turn, make_codec
from backend.engine.distributed.topology import Topology
from backend.engine.messages.channel import ChannelClosedError
from backend.engine.messages.protocol import Failed
from backend.engine.processes import ending, start_follower
from backend.errors import BackendError, GroupLostError, UnsupportedError
from backend.model.checkpoint.config import read_config
from backend.model.checkpoint.weights import memory_bytes
from backend.model.loaded import RunnableModel
from backend.model.loader import look
from common.process.lifeline import Process


class TokenCheck:
    """The checksums of rank 0, until every other rank has confirmed them.

    Attributes:
        statuses: The latest status of every other rank.
    """

    def __init__(self, reports: Mapping[int, Report]) -> None:
        """Start with a report of every other rank."""
        self.statuses: dict[int, EngineStatus] = {}
        self._turns = dict.fromkeys(reports, 0)
        self._checksums: dict[int, int] = {}
        for rank, report in reports.items():
            self._turns[rank] = report.turn
            self.statuses[rank] = report.status

    def note(self, turn: int, checksum: int) -> None:
        """Record the checksum of rank 0 at the end of a turn."""
        self._checksums[turn] = checksum

    def compare(self, rank: int, report: Report) -> None:
        """Compare another rank's checksum at the end of a recorded turn.

        Raises:
            GroupLostError: They differ.
        """
        if report.checksum != self._checksums[report.turn]:
            raise GroupLostError(
                f"rank {rank} has drawn other tokens than rank 0 by turn {report.turn}: are the "
                "machines, their packages and the model's files alike?"
            )
        self.statuses[rank] = report.status
        self._turns[rank] = report.turn
        oldest = min(self._turns.values())
        self._checksums = {n: value for n, value in self._checksums.items() if n > oldest}


# Maximum delay between a failure and the news of the rank that caused it.
NEWS_DELAY_S = 2.0


class Members:
    """All ranks of a group but the first.

    Attributes:
        form: The group, with all open choices decided.
    """

    def __init__(
        self, form: Form, members: Sequence[Member], fail: Callable[[BackendError], NoReturn]
    ) -> None:
        """Start listening to each of them.

        Args:
            form: The group.
            members: By rank.
            fail: Called when one fails or hangs up: the group is lost.
        """
        self.form = form
        self._members = members
        self._codec = make_codec()
        self._fail = fail
        self._ready: dict[int, queue.SimpleQueue[Ready]] = defaultdict(queue.SimpleQueue)
        self._reports: queue.SimpleQueue[tuple[int, Report]] = queue.SimpleQueue()
        self._check: TokenCheck
        for member in members:
            threading.Thread(target=self._listen, args=(member,), daemon=True).start()

    def join(self, joins: Sequence[Join]) -> None:
        """Have every rank link up and load its shard."""
        for member in self._members:
            with self._named(member):
                member.channel.send(joins[member.rank])

    def agree(self, own: Ready) -> Start:
        """Wait until all have loaded, and return their common budgets."""
        others = [self._ready[member.rank].get() for member in self._members]
        start = agreement([own, *others])
        for member in self._members:
            with self._named(member):
                member.channel.send(start)
        synchronise()
        return start

    def begin(self) -> None:
        """Wait for the first report of each."""
        self._check = TokenCheck(dict(self._reports.get() for _ in self._members))

    def send(self, turn: Turn) -> None:
        """Send the plan of a turn to all."""
        frame = self._codec.encode(turn)
        for member in self._members:
            with self._named(member):
                member.channel.send_frame(frame)

    def check(self, turn_number: int, checksum: int | None) -> None:
        """Compare the tokens drawn by others with those of rank 0.

        Args:
            turn_number: Of the latest turn.
            checksum: Of rank 0 after that turn, if it is one to be compared.

        Raises:
            GroupLostError: One of them drew different tokens.
        """
        if checksum is not None:
            self._check.note(turn_number, checksum)
        while not self._reports.empty():
            self._check.compare(*self._reports.get())

    def memories(self) -> Mapping[int, Mapping[str, int]]:
        """Return the memory of each, by part."""
        return {rank: each.memory_bytes for rank, each in self._check.statuses.items()}

    @contextmanager
    def _named(self, member: Member) -> Iterator[None]:
        """Report the rank that cannot be reached: an orderly end would hide it."""
        try:
            yield
        except ChannelClosedError as error:
            # The thread that listens to it reports how it ended, and ends this process first.
            time.sleep(NEWS_DELAY_S)
            raise GroupLostError(f"{self._name(member)} has hung up") from error

    def _name(self, member: Member) -> str:
        size = len(self._members) + 1
        return f"rank {member.rank} of {size} (process {member.hello.process_id})"

    def _listen(self, member: Member) -> None:
        """Receive another rank's messages; if it fails or hangs up, the group is lost."""
        try:
            while True:
                match message := member.channel.receive():
                    case Ready():
                        self._ready[member.rank].put(message)
                    case Report():
                        self._reports.put((member.rank, message))
                    case Failed(failure):
                        self._fail(failure.error())
        except ChannelClosedError:
            self._fail(GroupLostError(f"{self._name(member)} {ending(member.process)}"))


def form_group(
    form: Form, fail: Callable[[BackendError], NoReturn]
) -> tuple[Members, RunnableModel, Start]:
    """Gather a group and load its shards; return both, and the budgets.

    Args:
        form: The group, as the options request it.
        fail: Ends the group.

    Raises:
        InvalidRequestError: MLX has no such backend here.
        LoadError: The model cannot be divided, or a rank is missing or has failed.
    """
    options = form.options
    if options.adapters:
        raise UnsupportedError(
            "LoraAdapters: a model on several processes does not support adapters"
        )
    topology = replace(form.topology, backend=usable_backend(form.topology))
    form = Form(
        topology=topology,
        # Towers are not divided, only the text part of such a model.
        options=replace(options, tuning=options.tuning.updated(vision=False)),
        directory=form.directory,
        timeout_s=form.timeout_s,
    )
    # First, because they import MLX meanwhile. If this one fails, they end with it.
    children = _started(topology)
    network = look(form.options, form.directory).network
    require_divisible(network, read_config(form.directory), topology)
    members = gather(form, make_codec(), children)
    joins = _invitations(form, members)
    group = Members(form, members, fail)
    group.join(joins)
    model = load_shard(joins[0])
    return group, model, group.agree(readiness(model, form, 0))


def _started(topology: Topology) -> Mapping[int, Process]:
    """Start the other ranks of this machine."""
    return {
        rank: start_follower(rank, str(topology.control), device=device)
        for device, rank in enumerate(topology.local_ranks)
        if rank > 0
    }


def _invitations(form: Form, members: Sequence[Member]) -> list[Join]:
    memory = [memory_bytes(), *(member.hello.memory_bytes for member in members)]
    split = pipeline_split(form, memory)
    return [Join(form=form, rank=rank, split=split) for rank in range(form.topology.size)]
