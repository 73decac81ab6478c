"""Every other rank: it follows rank 0, turn by turn, and ends with it."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from backend.engine.distributed.gathering import (
    CHECK_INTERVAL_TURNS,
    Hello,
    Join,
    Report,
    Turn,
    software,
)
from backend.engine.distributed.linking import (
    assemble_shared_loop,
    load_shard,
    readiness,
    synchronise,
)
from backend.engine.distributed.topology import Endpoint
from backend.engine.grammars.pool import GrammarWorkshop
from backend.engine.loop import EngineLoop
from backend.engine.messages.codec import Channel, ChannelClosedError, Codec
from backend.engine.messages.protocol import DiskNews, Failed, Failure, Resize, Told
from backend.engine.port import Command, Pace, Reportable
from backend.errors import BackendError, GroupLostError
from backend.model.checkpoint.weights import memory_bytes
from common.process import exit_at_once

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


class FollowerPort:
    """The port of a rank that repeats the turns of rank 0; only rank 0 tells the server."""

    is_shared = True

    def __init__(self, leader: Channel) -> None:
        self._leader = leader
        self._turn = Turn(0, (), None)

    def post(self, news: DiskNews | Resize) -> None:
        """Take nothing: ranks have neither disk nor ledger."""

    def receive(self, *, waits: bool, timeout_s: float | None) -> Sequence[Command]:  # noqa: ARG002
        """Wait for the next turn of rank 0, and return its commands."""
        self._turn = self._leader.receive()
        return self._turn.commands

    def agree(self, pace: Pace | None) -> Pace | None:  # noqa: ARG002
        """Return the pace of rank 0."""
        return self._turn.pace

    def note_pass(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
        """Tell nobody."""

    def hand_over(self, told: Told, /) -> None:
        """Send nothing."""

    def answer(self, results: Sequence[tuple[int, object]], /) -> None:
        """Send nothing."""

    def report(self, loop: Reportable, *, is_idle: bool) -> None:
        """Send rank 0 the checksum of all tokens from time to time."""
        if is_idle or self._turn.number % CHECK_INTERVAL_TURNS == 0:
            self._leader.send(Report(self._turn.number, loop.counters.checksum, loop.status()))

    def send_status(self, loop: Reportable) -> None:
        """Send nothing: rank 0 does."""


@dataclass(frozen=True, slots=True)
class Follower:
    """One rank that follows rank 0.

    Attributes:
        size: Of the group; 0 if unknown.
        codec: Of the connection; learns grammars when the model is loaded.
    """

    rank: int
    size: int
    leader: Channel
    codec: Codec

    def run(self) -> NoReturn:
        """Take part in one group; the process ends with it."""
        try:
            own = (os.getpid(), memory_bytes(), software())
            self.leader.send(Hello(self.rank, self.size, *own))
            self._joined().run()
            exit_at_once(0)
        except ChannelClosedError:
            os._exit(0)
        except BackendError as error:
            self._fail(error)
        except Exception as error:
            log.exception("rank %d failed", self.rank)
            time.sleep(_NEWS_DELAY_S)
            self._fail(GroupLostError(f"rank {self.rank} failed: {error}"))

    def _joined(self) -> EngineLoop:
        join = self.leader.receive()
        if isinstance(join, Failed):
            log.error("rank 0 refuses this process: %s", join.failure.text)
            exit_at_once(1)
        self.leader.watch(lambda: os._exit(0))
        return self._loop(join)

    def _loop(self, join: Join) -> EngineLoop:
        form = join.form
        model = load_shard(join)
        self.leader.send(readiness(model, form, join.rank))
        start = self.leader.receive()
        synchronise()
        self.codec.read_grammar = GrammarWorkshop(model.tokenizer, model.card).read
        port = FollowerPort(self.leader)
        loop = assemble_shared_loop(model, form.options, start, port)
        port.report(loop, is_idle=True)
        return loop

    def _fail(self, error: BackendError) -> NoReturn:
        log.error("rank %d: %s", self.rank, error)
        with contextlib.suppress(ChannelClosedError):
            self.leader.send(Failed(Failure.of(error)))
        exit_at_once(1)
