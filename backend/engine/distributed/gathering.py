"""Rank 0 gathers the other ranks: it waits for each, and admits no other process.

rank 0 --Join, Start, Turn--> the other ranks
rank 0 <--Hello, Ready, Report, Failed-- the other ranks
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from backend.config import ModelOptions
from backend.core import engine_status as status
from backend.engine.distributed.topology import Endpoint, Host, Topology
from backend.engine.messages.codec import Channel, ChannelClosedError, Codec
from backend.engine.messages.protocol import Cancel, Expect, Failed, Failure, Job, Leave, Submit
from backend.engine.port import Pace
from backend.engine.processes import ending
from backend.errors import GroupNotFormedError
from common.process import Process
from common.remedies import versions_of

CHECK_INTERVAL_TURNS = 32
"""Turns between comparisons of the tokens of all ranks."""


log = logging.getLogger(__name__)


class Form(Struct, frozen=True, kw_only=True):
    """A group, the model that it will load, and how long a rank may take to join."""

    topology: Topology
    options: ModelOptions
    directory: Path
    timeout_s: float


class Hello(Struct, frozen=True, tag=True, array_like=True):
    """From another rank: it is present.

    Attributes:
        size: Of the group it was started for; 0 if only its starter knows.
        software: The versions that must be equal on all ranks.
    """

    rank: int
    size: int
    process_id: int
    memory_bytes: int
    software: str


class Join(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """To another rank: link up, and load its shard.

    Attributes:
        split: Layers of each rank of a pipeline; none leaves it to the model.
    """

    form: Form
    rank: int
    split: tuple[int, ...] = ()


class Ready(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """From a rank: its shard is loaded. `layers` is the number of caches of one sequence."""

    layers: int
    cache_kinds: tuple[str, ...]
    kv_budget_bytes: int
    cache_budget_bytes: int


class Start(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """To every rank: start, with the memory for KV caches, and its part for the prompt cache."""

    kv_bytes_per_layer: int
    cache_bytes_per_layer: int


GroupCommand: TypeAlias = Submit | Cancel | Expect | Job | Leave


class Turn(Struct, frozen=True, tag=True, array_like=True):
    """The plan of a turn: its commands, and the work that the clock allows.

    Attributes:
        pace: `None` if the turn does not depend on the clock.
    """

    number: int
    commands: tuple[GroupCommand, ...]
    pace: Pace | None


class Report(Struct, frozen=True, tag=True, array_like=True):
    """The state of a rank after a turn.

    Attributes:
        checksum: Of all tokens drawn so far; equal on every rank.
    """

    turn: int
    checksum: int
    status: status.EngineStatus


Message: TypeAlias = Hello | Join | Ready | Start | Turn | Report | Failed


def make_codec() -> Codec:
    """Return a codec of the messages between ranks; it reads no grammars yet."""
    return Codec(Message)


_PACKAGES = ("mlx-grpc-backend", "mlx", "mlx-lm")


def software() -> str:
    """Return the versions in this process."""
    return versions_of(_PACKAGES)


_LOOK_INTERVAL_S = 0.1
HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """Another rank, as rank 0 knows it; `process` is `None` on another machine."""

    hello: Hello
    channel: Channel
    process: Process | None

    @property
    def rank(self) -> int:
        """Its number."""
        return self.hello.rank


def gather(form: Form, codec: Codec, children: Mapping[int, Process]) -> list[Member]:
    """Return all other ranks, in order.

    Raises:
        GroupNotFormedError: Some did not join in time; the message names them.
    """
    topology = form.topology
    with _listening(topology) as listener:
        gathering = _Gathering(topology, codec, children)
        deadline = time.monotonic() + form.timeout_s
        while missing := gathering.missing():
            if time.monotonic() > deadline:
                absence = _absence(topology, missing, form.timeout_s)
                raise GroupNotFormedError(absence + gathering.refusal)
            gathering.require_children()
            gathering.admit_next(listener)
    return [gathering.members[rank] for rank in sorted(gathering.members)]


class _Gathering:
    """The ranks that have joined so far.

    Attributes:
        refusal: Describes the last one that was refused, if any.
    """

    def __init__(self, topology: Topology, codec: Codec, children: Mapping[int, Process]) -> None:
        self.members: dict[int, Member] = {}
        self._topology = topology
        self._codec = codec
        self._children = children
        self._software = software()
        self.refusal = ""
        self._addresses = [_addresses_of(host) for host in topology.hosts]

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in range(1, self._topology.size) if rank not in self.members]

    def require_children(self) -> None:
        """Raise if a process started here has ended."""
        for rank, child in self._children.items():
            if child.poll() is not None:
                raise GroupNotFormedError(
                    f"rank {rank} {ending(child)} before it joined; see the log"
                )

    def admit_next(self, listener: socket.socket) -> None:
        """Admit the next connection, if one arrives soon and belongs to the group."""
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        connection.settimeout(None)
        channel = Channel(connection, self._codec)
        try:
            hello = channel.receive(HELLO_TIMEOUT_S)
        except (TimeoutError, ChannelClosedError) as error:
            log.warning("a connection from %s sent no hello: %s", channel.peer_address, error)
            channel.close()
            return
        if problem := self._problem(hello, channel.peer_address):
            log.warning("a connection from %s is refused: %s", channel.peer_address, problem)
            self.refusal = f"; a connection from {channel.peer_address} was refused: {problem}"
            with contextlib.suppress(ChannelClosedError):
                channel.send(Failed(Failure.of(GroupNotFormedError(problem))))
            channel.close()
        else:
            self.members[hello.rank] = Member(hello, channel, self._children.get(hello.rank))

    def _problem(self, hello: object, address: str) -> str:
        size = self._topology.size
        if not isinstance(hello, Hello) or hello.rank not in range(1, size):
            return f"it is no rank between 1 and {size - 1}"
        if hello.size not in (0, size):
            return f"it was started for {hello.size} ranks, and this group has {size}"
        if hello.software != self._software:
            return f"rank {hello.rank} has {hello.software}, and rank 0 has {self._software}"
        if hello.rank in self.members:
            return f"rank {hello.rank} is there already"
        # A local rank may connect from any local address.
        is_here = self._topology.hosts[hello.rank].is_local and Endpoint(address, 0).is_local
        if not is_here and address not in self._addresses[hello.rank]:
            return f"rank {hello.rank} is at {', '.join(sorted(self._addresses[hello.rank]))}"
        return ""


def _addresses_of(host: Host) -> set[str]:
    """Return the addresses of a host, with its names resolved."""
    addresses = {endpoint.address for endpoint in host.endpoints}
    for name in tuple(addresses):
        with contextlib.suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(name, None, socket.AF_INET)
            addresses.update(str(place[0]) for *_, place in found)
    return addresses


@contextlib.contextmanager
def _listening(topology: Topology) -> Iterator[socket.socket]:
    """Listen only on the address of rank 0."""
    control = topology.control
    try:
        listener = socket.create_server((control.address, control.port), backlog=topology.size)
    except OSError as error:
        raise GroupNotFormedError(f"rank 0 cannot listen at {control}: {error}") from error
    with listener:
        listener.settimeout(_LOOK_INTERVAL_S)
        yield listener


def _absence(topology: Topology, missing: list[int], timeout_s: float) -> str:
    named = ", ".join(f"rank {rank} ({topology.hosts[rank]})" for rank in missing)
    return (
        f"{named} did not come within {timeout_s:g} s; on such a machine run: "
        f"mlx-grpc-backend rank --hostfile FILE --rank {missing[0]}"
    )
