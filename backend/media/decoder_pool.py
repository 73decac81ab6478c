"""Decodes media in processes that can be ended, and give their memory back."""

import atexit
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

import msgspec

from backend.config import DECODE_PROCESSES, HELPER_GRACE_S, MAX_DECODE_CPU_S, MEDIA_NICENESS
from backend.core.prompt import Medium
from backend.errors import HelperLostError, InvalidRequestError, UnsupportedError
from backend.media.container import needed
from backend.media.decode import Decoded, DecodedAudio, DecodedImage, DecodedVideo
from backend.media.decoding_process import Head, Job, Pictures, Refusal, Sound
from common.helper import (
    HelperError,
    HelperPool,
    HelperProcess,
    no_reader_required,
    start_python,
)
from common.rpc import require_caller

if TYPE_CHECKING:
    from PIL.Image import Image

# The limit is one of processor time: others may take most of the machine's.
_WAIT_S = 120.0
MAX_ANSWER_BYTES = 2**24
_KILLED = "the process that decodes media was killed twice, or none can start: try again"


def start_decoding(number: int) -> subprocess.Popen[bytes]:
    """Start a process that takes its jobs from a file descriptor."""
    return start_python("backend.media.decoding_process", number, niceness=MEDIA_NICENESS)


def _new() -> HelperProcess:
    return HelperProcess(start_decoding, max_answer_bytes=MAX_ANSWER_BYTES)


class DecoderProcesses:
    """A few processes, started on demand; used from any thread."""

    def __init__(
        self, count: int = DECODE_PROCESSES, *, start: Callable[[], HelperProcess] = _new
    ) -> None:
        """Start with no process; `start` makes them, `count` at most."""
        self._start = start
        self._pool: HelperPool[HelperProcess] = HelperPool(count, grace_s=HELPER_GRACE_S)
        self.close = self._pool.close

    def decode(self, medium: Medium, *, sampling_rate: int) -> Decoded:
        """Decode a medium, as `backend.media.decode.decode` does.

        Raises:
            InvalidRequestError: It is of another kind than its field, is damaged, or exceeds a
                limit.
            UnsupportedError: A required library is not installed.
            HelperLostError: Somebody ended the process twice.
            AbandonedError: The caller has gone.
        """
        job = Job(medium.kind, medium.field, medium.payload, sampling_rate)
        try:
            return self._pool.run(self._start, lambda process: _Decoding(process, job))
        except HelperError as error:
            if error.was_killed:
                raise HelperLostError(_KILLED) from error
            raise _too_much(medium.field) from error


class _Decoding:
    """The conversation about a medium; the first answer is its head."""

    def __init__(self, process: HelperProcess, job: Job) -> None:
        self.process = process
        self.owed = 0
        self._job = job
        self._deadline = time.monotonic() + _WAIT_S
        self._head: Head | None = None

    def held(self) -> Decoded:
        require_caller()
        self.owed = 1
        self.process.send(msgspec.msgpack.encode(self._job), self._deadline)
        match head := self._next_head():
            case Refusal(field, problem):
                raise InvalidRequestError(field, problem) if field else UnsupportedError(problem)
            case Sound():
                return self._sound(head)
            case Pictures():
                return self._pictures(head)
            case _:
                assert_never(head)

    def finish(self, deadline: float) -> None:
        self._deadline = deadline
        try:
            if self.owed and self._head is None:
                self._next_head(no_reader_required)
            while self.owed:
                self._next(no_reader_required)
        except HelperError:
            return

    def _next_head(self, require_reader: Callable[[], None] = require_caller) -> Head:
        data = self._next(require_reader)
        head: Head = msgspec.msgpack.decode(data, type=Head)
        self._head = head
        self.owed = _later_answers(head)
        return head

    def _next(self, require_reader: Callable[[], None] = require_caller) -> bytes:
        data = self.process.receive(self._deadline, require_reader)
        self.owed -= 1
        return data

    def _sound(self, head: Sound) -> DecodedAudio:
        import numpy as np

        samples = b"".join([self._next() for _ in range(head.answers)])
        return DecodedAudio(
            np.frombuffer(samples, np.float32), self._job.sampling_rate, head.digest
        )

    def _pictures(self, head: Pictures) -> DecodedImage | DecodedVideo:
        if not head.times_s:
            return DecodedImage(self._picture(head), head.digest)
        from backend.media.video import Frame

        frames = [Frame(self._picture(head), time_s) for time_s in head.times_s]
        return DecodedVideo(tuple(frames), head.digest)

    def _picture(self, head: Pictures) -> "Image":
        """Put a picture together; in bands, so that no other thread waits for long."""
        with needed("Pillow", "media"):
            from PIL import Image
        picture = Image.new("RGB", head.size, None)
        width, height = head.size
        for top in range(0, height, head.band):
            size = (width, min(head.band, height - top))
            picture.paste(Image.frombytes("RGB", size, self._next()), (0, top))
        return picture


def _later_answers(head: Head) -> int:
    match head:
        case Refusal():
            return 0
        case Sound():
            return head.answers
        case Pictures():
            return max(1, len(head.times_s)) * -(-head.size[1] // head.band)
        case _:
            assert_never(head)


def _too_much(field: str) -> InvalidRequestError:
    problem = f"takes more than {MAX_DECODE_CPU_S} s or too much memory to decode"
    return InvalidRequestError(field, problem)


PROCESSES = DecoderProcesses()
atexit.register(PROCESSES.close)
decode_apart = PROCESSES.decode
