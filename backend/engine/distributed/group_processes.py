"""The processes of a group, as the server holds them: a tree that is killed as a whole.

The server links to no rank: what MLX links cannot be undone within a process.
"""

import socket
from collections.abc import Callable

from backend.core.status import EngineStatus
from backend.engine.distributed.channel import Channel, ChannelClosedError
from backend.engine.distributed.grammars import teach_sending
from backend.engine.distributed.messages import Failed, Form, Formed, make_codec
from backend.engine.distributed.processes import ending, kill_group, start_leader
from backend.engine.distributed.topology import Topology
from backend.errors import BackendError, GroupLostError, GroupNotFormedError, LoadCancelledError

_POLL_INTERVAL_S = 0.1


class GroupProcesses:
    """The processes, and the connection to rank 0.

    Attributes:
        reason: Why they are about to end, if rank 0 has said so.
        has_ended: Whether they were told to.
        status: The latest that rank 0 has told of itself.
    """

    def __init__(self, topology: Topology) -> None:
        """Start rank 0."""
        self.reason: BackendError | None = None
        self.has_ended = False
        self.status = EngineStatus()
        self._size = topology.size
        codec = make_codec()
        teach_sending(codec)
        ours, theirs = socket.socketpair()
        with theirs:
            self._leader = start_leader(topology, theirs.fileno())
        self.channel = Channel(ours, codec)

    def form(self, form: Form, cancelled: Callable[[], bool]) -> Formed:
        """Wait until all ranks have loaded their shards.

        Raises:
            LoadError: They have not, and why.
        """
        try:
            self.channel.send(form)
            return self._formed(cancelled)
        except ChannelClosedError:
            raise GroupNotFormedError(self._told_end()) from None

    def _formed(self, cancelled: Callable[[], bool]) -> Formed:
        while not cancelled():
            try:
                message = self.channel.receive(_POLL_INTERVAL_S)
            except TimeoutError:
                continue
            match message:
                case Failed(GroupLostError() as error):
                    raise GroupNotFormedError(f"while the model was loading: {error}")
                case Failed(error):
                    raise error
                case Formed():
                    self.status = message.status
                    return message
        raise LoadCancelledError("the load was cancelled")

    def loss(self) -> BackendError:
        """Return why the connection has ended."""
        return self.reason or GroupLostError(self._told_end())

    def end(self) -> None:
        """End all processes; those of other machines notice."""
        self.has_ended = True
        self.channel.close()
        kill_group(self._leader)

    def _told_end(self) -> str:
        return f"rank 0 of {self._size} (process {self._leader.pid}) {ending(self._leader)}"
