"""A process that writes grammars, seen from the engine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any, TypeAlias

from msgspec import Struct

from backend.config import MAX_WRITING_S
from backend.core.guide import ReplyRule
from backend.engine.messages.channel import Channel, ChannelClosedError
from backend.engine.messages.codec import Codec
from backend.engine.messages.failure import Failure
from backend.errors import GrammarError, HelperLostError
from common.process.lifeline import Process, tied

# A new process spends a quarter of a second on imports.
_START_S = 60.0
_GRACE_S = 0.25
_BOOT = (
    "import sys; sys.path[:] = {path!r}; "
    "from backend.engine.grammars.writing import main; main({number}, {parent})"
)
# Sent from outside, by somebody or by the kernel.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})


class Begin(Struct, frozen=True, tag=True, array_like=True):
    """To the process, first: what the model's vocabulary can write; see `Vocabulary.spelling`."""

    alphabet: bytes
    markers: dict[str, int]
    eos_ids: frozenset[int]
    size: int


class Write(Struct, frozen=True, tag=True, array_like=True):
    """To the process: write a grammar.

    Attributes:
        is_suspect: Whether a process has been lost over it: trials are made in forks.
    """

    rule: ReplyRule
    is_suspect: bool = False


class Ready(Struct, frozen=True, tag=True, array_like=True):
    """From the process: it has begun."""


class Written(Struct, frozen=True, tag=True, array_like=True):
    """From the process: a grammar that has passed its trial.

    Attributes:
        rules: Its start, then its definitions; none if the reply is free.
        objection: Why its calls are free; empty if they are not.
        told: Lines for the log.
    """

    rules: tuple[str, ...]
    objection: str = ""
    told: tuple[str, ...] = ()


Order: TypeAlias = Begin | Write
Answer: TypeAlias = Ready | Written | Failure


class WriterLostError(Exception):
    """The process has ended.

    Attributes:
        was_killed: Whether somebody else ended it, so that its grammar may not be the reason.
    """

    def __init__(self, *, was_killed: bool) -> None:
        super().__init__()
        self.was_killed = was_killed


class WritingTooLongError(GrammarError):
    """Writing a grammar exceeds its limits, whatever is wrong with it."""


class WriterProcess:
    """One process; used by one thread at a time."""

    def __init__(self, begin: Begin, limit_s: float = MAX_WRITING_S) -> None:
        """Start it.

        Args:
            begin: What the model's vocabulary can write.
            limit_s: Limit of the time for one grammar; a process that takes longer is killed.
        """
        self._limit_s = limit_s
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _started(theirs.fileno())
        self._channel = Channel(ours, Codec(Answer))
        self._channel.send(begin)
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        """Whether it is running."""
        return self._process.poll() is None

    def written(self, rule: ReplyRule, *, is_suspect: bool = False) -> Written:
        """Return the grammar of a rule, which has passed its trial.

        Args:
            rule: The rule.
            is_suspect: Whether a process has been lost over it.

        Raises:
            GrammarError: The rule is malformed, or cannot be enforced.
            WritingTooLongError: It takes too long; the process has been killed.
            WriterLostError: The process has ended.
        """
        try:
            if not self._is_ready:
                self._channel.receive(_START_S)
                self._is_ready = True
            self._channel.send(Write(rule, is_suspect))
            answer = self._channel.receive(self._limit_s)
        except TimeoutError:
            self.kill()
            problem = f"takes longer than {self._limit_s:g} s to translate"
            raise WritingTooLongError(problem) from None
        except ChannelClosedError as error:
            raise self._lost() from error
        if isinstance(answer, Failure):
            raise answer.error()
        written: Written = answer
        return written

    def kill(self) -> None:
        """Kill it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _lost(self) -> WriterLostError:
        # Its end follows that of its connection.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()
        return WriterLostError(was_killed=self._process.returncode in _FROM_OUTSIDE)


def lost_twice(error: WriterLostError) -> WritingTooLongError | HelperLostError:
    """Return the error for a request over which two processes have ended."""
    if error.was_killed:
        return HelperLostError("the process that writes grammars was killed twice: try again")
    return WritingTooLongError("is too large")


def _started(number: int) -> Process:
    code = _BOOT.format(path=sys.path, number=number, parent=os.getpid())
    arguments: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": 2}
    return tied(
        lambda descriptors: subprocess.Popen(  # noqa: S603 (our own program)
            [sys.executable, "-c", code], pass_fds=[number, *descriptors], **arguments
        )
    )
