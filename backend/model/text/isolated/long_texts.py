"""Tokenises long texts in a separate process: nobody waits for them, and they have a limit.

A tokenizer reads a text without safe places to divide it, such as a long one in Chinese, in one
call that cannot be left, and whose time may grow with the square of its length.
"""

import logging
import pickle
import subprocess
import time
import weakref
from array import array

from tokenizers import Tokenizer as FastTokenizer

from backend.config import HELPER_GRACE_S, LONG_TEXT_NICENESS, MAX_ENCODE_CPU_S
from backend.errors import TEXT_FIELD, HelperLostError, InvalidRequestError
from backend.model.text.guard import GUARD
from backend.model.text.isolated.encoding import (
    NUMBERS,
    Definition,
    LongText,
)
from backend.model.text.reading import NUMBER_TYPE, Reading, columns
from common.helper import (
    HelperError,
    HelperPool,
    HelperProcess,
    Question,
    kill_all,
    start_python,
)

log = logging.getLogger(__name__)

# The limit is one of processor time: others may take most of the machine's.
_WAIT_S = 120.0
_MAX_ANSWER_BYTES = 2**30
_KILLED = "the process that tokenises long texts was killed twice, or none can start: try again"


def start_process(number: int) -> subprocess.Popen[bytes]:
    """Start a process that takes its jobs from a file descriptor."""
    module = "backend.model.text.isolated.encoding"
    return start_python(module, number, niceness=LONG_TEXT_NICENESS)


class LongTexts:
    """One process, started for the first long text; used from any thread, by one at a time."""

    def __init__(
        self, tokenizer: FastTokenizer, path: str, *, seconds: int = MAX_ENCODE_CPU_S
    ) -> None:
        """Start nothing yet.

        Args:
            path: The file that it was read from, without later changes; empty if there is none.
        """
        self._seconds = seconds
        self._tokenizer = tokenizer
        self._path = path
        self._pool: HelperPool[HelperProcess] = HelperPool(1, grace_s=HELPER_GRACE_S)
        self.idle = self._pool.idle
        weakref.finalize(self, kill_all, self.idle)

    def columns(self, reading: Reading, text: str, second: str = "") -> list["array[int]"]:
        """Return the numbers of tokens, as `backend.model.text.reading.columns` does.

        A list of millions would hold Python's lock while it is made, and while it is dropped.

        Raises:
            InvalidRequestError: It is not Unicode, or takes too much time or memory.
            HelperLostError: Somebody ended the process twice.
            AbandonedError: The caller has gone.
        """
        is_guarded = reading is Reading.PLAIN and GUARD in text
        job = LongText(text, self._seconds, reading, second, is_guarded)
        data = pickle.dumps(job)
        try:
            answer = self._pool.run(self._new, lambda process: Question(process, data, _WAIT_S))
        except HelperError as error:
            if error.was_killed:
                raise HelperLostError(_KILLED) from error
            raise self._too_long() from error
        return _columns_of(answer, reading)

    def _too_long(self) -> InvalidRequestError:
        problem = f"takes more than {self._seconds} s or too much memory to tokenise"
        return InvalidRequestError(TEXT_FIELD, problem)

    def _new(self) -> HelperProcess:
        """Start a process, and give it the tokenizer."""
        process = HelperProcess(start_process, max_answer_bytes=_MAX_ANSWER_BYTES)
        try:
            process.await_start()
            if not (self._path and self._is_alike(process, self.definition(self._path))):
                # A tokenizer as text takes the interpreter's lock for a third of a second.
                self._is_alike(process, self.definition(""))
        except BaseException:
            process.kill()
            raise
        return process

    def definition(self, path: str) -> Definition:
        """Return a definition for a process: the file at a path, or else the tokenizer as text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return Definition(
            path=path,
            text="" if path else self._tokenizer.to_str(),
            added=[added[token_id] for token_id in sorted(added)],
            guard=GUARD,
            splits_special=self._tokenizer.encode_special_tokens,
        )

    def _is_alike(self, process: HelperProcess, definition: Definition) -> bool:
        """Define the tokenizer of a process; tell whether it reads a sample as this one does."""
        from backend.model.text.tokenizer_file import SAMPLE

        deadline = time.monotonic() + _WAIT_S
        process.send(pickle.dumps(definition), deadline)
        process.receive(deadline)
        process.send(pickle.dumps(LongText(SAMPLE, self._seconds)), deadline)
        own = columns(self._tokenizer, Reading.PLAIN, SAMPLE)
        found = _columns_of(process.receive(deadline), Reading.PLAIN)
        return list(map(list, found)) == own


def _columns_of(answer: bytes, reading: Reading) -> list["array[int]"]:
    if answer[:1] != NUMBERS:
        raise InvalidRequestError(TEXT_FIELD, answer[1:].decode())
    numbers = array(NUMBER_TYPE)
    numbers.frombytes(answer[1:])
    rows = len(numbers) // reading.count
    return [numbers[start * rows : (start + 1) * rows] for start in range(reading.count)]
