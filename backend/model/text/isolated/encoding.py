"""The process that tokenises long texts: `isolated.long_texts` starts it."""

import pickle
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FastTokenizer

from backend.config import MAX_ENCODE_MEMORY_BYTES
from backend.errors import InvalidRequestError
from backend.model.text.guard import guarded
from backend.model.text.reading import NUMBER_TYPE, Reading, columns
from common.child import limit_memory, limit_time, serve
from common.machine_memory import trim

NUMBERS, REFUSAL = b"N", b"E"
# It ends when nobody has needed it for so long: its vocabulary takes 100 MB and more.
IDLE_S = 300.0
_TRIM_CHARS = 2**20


@dataclass(frozen=True, slots=True)
class Definition:
    """The parts that a tokenizer is made of.

    Attributes:
        path: Its `tokenizer.json`, or empty.
        text: The same as text, if there is no such file.
        added: Tokens in the order of their ids.
        splits_special: Whether special tokens in a text are read as plain text.
    """

    path: str
    text: str
    added: Sequence[AddedToken]
    guard: str
    splits_special: bool = False


@dataclass(frozen=True, slots=True)
class LongText:
    """A text to tokenise, or two, in so many seconds of processor time."""

    text: str
    seconds: int
    reading: Reading = Reading.PLAIN
    second: str = ""
    is_guarded: bool = False


class _Encoder:
    """The tokenizer of the latest definition."""

    def __init__(self) -> None:
        self._plain = self._guarded = FastTokenizer(models.BPE())

    def answers(self, data: bytes) -> Iterator[bytes]:
        # Sent by the parent, which is trusted; answers are bytes.
        job: Definition | LongText = pickle.loads(data)  # noqa: S301
        if isinstance(job, Definition):
            self._define(job)
            yield b""
            return
        limit_time(job.seconds)
        yield self._answer(job)
        if len(job.text) >= _TRIM_CHARS:
            trim()

    def _define(self, made: Definition) -> None:
        tokenizer = (
            FastTokenizer.from_file(made.path) if made.path else FastTokenizer.from_str(made.text)
        )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = made.splits_special
        tokenizer.add_tokens(made.added)
        self._plain, self._guarded = tokenizer, guarded(tokenizer, made.guard)

    def _answer(self, job: LongText) -> bytes:
        tokenizer = self._guarded if job.is_guarded else self._plain
        try:
            found = columns(tokenizer, job.reading, job.text, job.second)
        except InvalidRequestError as error:
            return REFUSAL + error.problem.encode()
        return b"".join([NUMBERS, *(array(NUMBER_TYPE, column).tobytes() for column in found)])


def main(descriptor: int) -> None:
    """Serve jobs until the other end of the socket is closed."""
    limit_memory(MAX_ENCODE_MEMORY_BYTES)
    serve(descriptor, _Encoder().answers, idle_s=IDLE_S)
