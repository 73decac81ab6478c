"""A process that writes grammars, seen from the engine."""

import time
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec import Struct

from backend.core.guide import ReplyRule
from backend.engine.messages.codec import MAX_FRAME_BYTES
from backend.engine.messages.protocol import Failure
from backend.errors import GrammarError, HelperLostError
from common.helper import START_S, HelperProcess, ProcessEndedError, start_python

_MODULE = "backend.engine.grammars.writing"


class Begin(Struct, frozen=True, tag=True, array_like=True):
    """To the process, first: the bytes and special tokens of the model's vocabulary.

    See `Vocabulary.spelling`. The process answers without words when it has begun.
    """

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


class Written(Struct, frozen=True, tag=True, array_like=True):
    """From the process: a grammar that has passed its trial.

    Attributes:
        rules: Its start, then its definitions; none if the reply is free.
        objection: Why its calls are free; empty if they are not.
    """

    rules: tuple[str, ...]
    objection: str = ""
    told: tuple[str, ...] = ()


Order: TypeAlias = Begin | Write
Answer: TypeAlias = Written | Failure


class WritingTooLongError(GrammarError):
    """Writing a grammar exceeds its limits, whatever is wrong with it."""


class WriterProcess(HelperProcess):
    """One process, with a vocabulary; used by one thread at a time."""

    def __init__(self, begin: Begin) -> None:
        start = partial(start_python, _MODULE, is_heard=True)
        super().__init__(start, max_answer_bytes=MAX_FRAME_BYTES)
        self.send(msgspec.msgpack.encode(begin), time.monotonic() + START_S)

    def receive_start(self, deadline: float) -> None:
        """Wait for its imports, and for the vocabulary, for which no rule is to blame."""
        super().receive_start(deadline)
        self.receive(deadline)


def lost_twice(error: ProcessEndedError) -> WritingTooLongError | HelperLostError:
    """Return the error for a request over which two processes have ended."""
    if error.was_killed:
        problem = "was killed twice, or none can start: try again"
        return HelperLostError(f"the process that writes grammars {problem}")
    return WritingTooLongError("is too large")
