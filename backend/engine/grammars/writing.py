"""The process that writes grammars and tries them; `grammars.writer_process` starts it.

It has neither model nor tokenizer: a rule comes with all that its grammar needs. It serves one
rule after another, and remembers the part of each tool's schema that a model can be held to.
"""

import logging
from collections.abc import Iterator

import msgspec

from backend.core.guide import ReplyRule
from backend.engine.grammars.writer_process import Answer, Begin, Order, Write, Written
from backend.engine.messages.protocol import Failure
from backend.engine.processes import die_first
from backend.errors import BackendError, GenerationFailedError, GrammarError
from backend.sampling.grammar.compiler import Trial
from backend.sampling.grammar.composition import Composer
from backend.sampling.grammar.vocabulary import Vocabulary
from common.child import serve


class _Kept(logging.Handler):
    """Keeps lines of the log, which the engine writes."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def taken(self) -> tuple[str, ...]:
        """Return the lines, and forget them."""
        lines, self._lines = self._lines, []
        return tuple(lines)


def main(descriptor: int) -> None:
    """Serve rules until the other end of the socket is closed."""
    die_first()
    logging.basicConfig(level=logging.INFO, handlers=[kept := _Kept()])
    serve(descriptor, _Writer(kept).answers)


class _Writer:
    """Writes with the vocabulary of the latest `Begin`."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept
        self._orders = msgspec.msgpack.Decoder(Order)

    def answers(self, data: bytes) -> Iterator[bytes]:
        match self._orders.decode(data):
            case Begin(alphabet, markers, eos_ids, size):
                self._trial = Trial(Vocabulary.spelling(alphabet, markers, eos_ids, size))
                self._composer = Composer(self._trial)
                yield b""
            case Write(rule, is_suspect):
                self._trial.forks = is_suspect
                yield msgspec.msgpack.encode(_written(self._composer, rule, self._kept))


def _written(composer: Composer, rule: ReplyRule, kept: _Kept) -> Answer:
    # Those of a rule that failed.
    kept.taken()
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
