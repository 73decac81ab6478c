"""The process that writes grammars and tries them; `grammars.writer_process` starts it.

It has neither model nor tokenizer: a rule comes with all that its grammar needs. It serves one
rule after another, and remembers what can be held of a tool.
"""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import NoReturn

from backend.core.guide import ReplyRule
from backend.engine.grammars.writer_process import Answer, Begin, Order, Ready, Write, Written
from backend.engine.messages.channel import Channel, ChannelClosedError
from backend.engine.messages.codec import Codec
from backend.engine.messages.failure import Failure
from backend.engine.processes import die_first, die_with_parent
from backend.errors import BackendError, GenerationFailedError, GrammarError
from backend.sampling.grammar.compiler import Trial
from backend.sampling.grammar.composition import Composer
from backend.sampling.grammar.vocabulary import Vocabulary
from common.process.lifecycle import STOP_SIGNALS


class _Kept(logging.Handler):
    """Keeps lines of the log, which the engine writes."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append(record.getMessage())

    def taken(self) -> tuple[str, ...]:
        """Return the lines, and forget them."""
        lines, self._lines = self._lines, []
        return tuple(lines)


def main(descriptor: int, parent: int) -> NoReturn:
    """Serve rules until the other end of the socket is closed.

    Args:
        descriptor: The socket.
        parent: The engine's process id.
    """
    die_with_parent(parent)
    die_first()
    # The server handles signals to the process group.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor), Codec(Order))
    with contextlib.suppress(ChannelClosedError):
        for answer in _answers(channel):
            channel.send(answer)
    os._exit(0)


def _answers(channel: Channel) -> Iterator[Answer]:
    logging.basicConfig(level=logging.INFO, handlers=[kept := _Kept()])
    begin: Begin = channel.receive()
    trial = Trial(Vocabulary.spelling(begin.alphabet, begin.markers, begin.eos_ids, begin.size))
    composer = Composer(trial)
    yield Ready()
    while True:
        order: Write = channel.receive()
        trial.forks = order.is_suspect
        yield _written(composer, order.rule, kept)


def _written(composer: Composer, rule: ReplyRule, kept: _Kept) -> Written | Failure:
    try:
        grammar = composer.composed(rule)
    except BackendError as error:
        return Failure.of(error)
    except (RecursionError, MemoryError):
        return Failure.of(GrammarError("is too large"))
    except Exception as error:  # noqa: BLE001 (any error of one rule)
        return Failure.of(GenerationFailedError(f"its grammar could not be written: {error}"))
    rules = (grammar.start, *grammar.definitions) if grammar else ()
    return Written(rules, composer.objection, kept.taken())
