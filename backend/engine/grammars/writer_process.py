"""A process that writes grammars, seen from the engine."""

import time
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec import Struct

from backend.config import MAX_WRITING_S
from backend.core.guide import ReplyRule
from backend.engine.messages.codec import MAX_FRAME_BYTES
from backend.engine.messages.protocol import Failure
from backend.errors import GrammarError, HelperLostError
from common.helper import (
    START_S,
    HelperProcess,
    ProcessEndedError,
    TooLateError,
    no_reader_required,
    start_python,
)

_MODULE = "backend.engine.grammars.writing"


class Begin(Struct, frozen=True, tag=True, array_like=True):
    """To the process, first: what the model's vocabulary can write; see `Vocabulary.spelling`.

    It answers without words when it has begun.
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
    """One process; used by one thread at a time."""

    def __init__(self, begin: Begin) -> None:
        start = partial(start_python, _MODULE, is_heard=True)
        super().__init__(start, max_answer_bytes=MAX_FRAME_BYTES)
        self._has_begun = False
        self.send(msgspec.msgpack.encode(begin), time.monotonic() + START_S)

    def written(
        self, rule: ReplyRule, limit_s: float = MAX_WRITING_S, *, is_suspect: bool = False
    ) -> Written:
        """Return the grammar of a rule, which has passed its trial.

        Args:
            limit_s: A process that takes longer is killed.

        Raises:
            GrammarError: The rule is malformed, or cannot be enforced.
            WritingTooLongError: It takes too long; the process has been killed.
            ProcessEndedError: The process has ended.
        """
        try:
            answer = self._answer(Write(rule, is_suspect), limit_s)
        except TooLateError:
            self.kill()
            problem = f"takes longer than {limit_s:g} s to translate"
            raise WritingTooLongError(problem) from None
        except ProcessEndedError:
            self.kill()
            raise
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def _answer(self, order: Write, limit_s: float) -> Answer:
        if not self._has_begun:
            self._begin()
        deadline = time.monotonic() + limit_s
        self.send(msgspec.msgpack.encode(order), deadline)
        answer: Answer = msgspec.msgpack.decode(
            self.receive(deadline, no_reader_required), type=Answer
        )
        return answer

    def _begin(self) -> None:
        """Wait for its imports and the vocabulary, for which no rule is to blame."""
        try:
            self.await_start()
            self.receive(time.monotonic() + START_S, no_reader_required)
        except TooLateError as error:
            raise ProcessEndedError(was_killed=True) from error
        self._has_begun = True


def lost_twice(error: ProcessEndedError) -> WritingTooLongError | HelperLostError:
    """Return the error for a request over which two processes have ended."""
    if error.was_killed:
        problem = "was killed twice, or none can start: try again"
        return HelperLostError(f"the process that writes grammars {problem}")
    return WritingTooLongError("is too large")
