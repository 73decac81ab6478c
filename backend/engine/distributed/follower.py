"""Every other rank: it follows rank 0, turn by turn, and ends with it."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

from backend.engine.distributed.messages import Hello, Join
from backend.engine.distributed.replica import Replica, readiness
from backend.engine.distributed.shard import load_shard, synchronise
from backend.engine.distributed.software import software
from backend.engine.distributed.topology import Endpoint
from backend.engine.grammars.workshop import GrammarWorkshop
from backend.engine.messages.channel import Channel, ChannelClosedError
from backend.engine.messages.codec import Codec
from backend.engine.messages.failure import Failure
from backend.engine.messages.protocol import Failed
from backend.engine.messages.stream import Publication
from backend.engine.session.session import Outlets
from backend.errors import BackendError, GroupLostError
from backend.model.checkpoint.weights import memory_bytes
from common.process.lifecycle import exit_at_once

_RETRY_INTERVAL_S = 0.1
# Rank 0 knows which rank is gone, and ends this process before it hears of the consequences.
_NEWS_DELAY_S = 1.0

log = logging.getLogger(__name__)


def reach(control: Endpoint, codec: Codec) -> Channel:
    """Return a connection to rank 0, waiting as long as it takes."""
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((control.address, control.port))
            return Channel(connection, codec)
        time.sleep(_RETRY_INTERVAL_S)


class Follower:
    """One rank that follows rank 0."""

    def __init__(self, rank: int, size: int, leader: Channel, codec: Codec) -> None:
        """Create a follower.

        Args:
            rank: Its number.
            size: Of the group; 0 if unknown.
            leader: The connection to rank 0.
            codec: Of the connection; learns grammars when the model is loaded.
        """
        self._rank = rank
        self._size = size
        self._leader = leader
        self._codec = codec

    def run(self) -> NoReturn:
        """Take part in one group; the process ends with it."""
        try:
            own = (os.getpid(), memory_bytes(), software())
            self._leader.send(Hello(self._rank, self._size, *own))
            self._follow(self._joined())
        except ChannelClosedError:
            os._exit(0)
        except BackendError as error:
            self._fail(error)
        except Exception as error:
            log.exception("rank %d failed", self._rank)
            time.sleep(_NEWS_DELAY_S)
            self._fail(GroupLostError(f"rank {self._rank} failed: {error}"))

    def _joined(self) -> Replica:
        join = self._leader.receive()
        if isinstance(join, Failed):
            log.error("rank 0 refuses this process: %s", join.failure.text)
            exit_at_once(1)
        self._leader.watch(lambda: os._exit(0))
        return self._replica(join)

    def _replica(self, join: Join) -> Replica:
        form = join.form
        model = load_shard(join)
        self._leader.send(readiness(model, form, join.rank))
        start = self._leader.receive()
        synchronise()
        self._codec.read_grammar = GrammarWorkshop(model.tokenizer, model.card).read
        outlets = Outlets(_keep_quiet, _keep_quiet)
        return Replica.shared(model, form.options, start, outlets)

    def _follow(self, replica: Replica) -> NoReturn:
        self._leader.send(replica.report(0))
        while True:
            turn = self._leader.receive()
            replica.follow(turn)
            # Rank 0 publishes them.
            replica.take_results()
            if replica.is_checked_after(turn):
                self._leader.send(replica.report(turn.number))

    def _fail(self, error: BackendError) -> NoReturn:
        log.error("rank %d: %s", self._rank, error)
        with contextlib.suppress(ChannelClosedError):
            self._leader.send(Failed(Failure.of(error)))
        exit_at_once(1)


def _keep_quiet(*_events: Sequence[Publication] | object) -> None:
    """Publish nothing: rank 0 does."""
