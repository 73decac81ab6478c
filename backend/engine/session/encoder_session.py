"""A loaded encoder at work: texts of many calls, several of similar length in a pass."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx

from backend.core.classification import ClassifyRequest
from backend.core.embedding import EmbeddingRequest
from backend.core.metric_table import zeros
from backend.core.model import ModelCard, ModelKind
from backend.core.scoring import JudgeRequest
from backend.core.status import EngineState, EngineStatus
from backend.engine.background.encoder import Encoder
from backend.engine.background.jobs import PIECE_ALONE_S
from backend.engine.background.text_queue import QueuedText, TextCall, TextQueue
from backend.engine.messages.commands import (
    Answer,
    Compute,
    Submit,
)
from backend.engine.messages.failure import Failure
from backend.engine.messages.stream import Publication
from backend.engine.rows.pacing import ChunkSizer
from backend.engine.session.pace import Pace
from backend.engine.session.session import Outlets, SessionCommand
from backend.errors import BackendError, GenerationFailedError, UnsupportedError
from backend.model.loaded import RunnableModel

MAX_PASS_TOKENS = 8192
PASSES_PER_CLEAR = 32

log = logging.getLogger(__name__)


class EncoderSession:
    """The `Session` of a model that only reads.

    A pass takes about as long as a piece of a background job without running requests.
    """

    idle_timeout_s = None

    def __init__(self, model: RunnableModel, outlets: Outlets) -> None:
        """Start idle.

        Args:
            model: A model that only reads texts.
            outlets: Receive results, and refusals of requests that need a decoder.
        """
        self.model = model
        self._outlets = outlets
        encoder = Encoder(model.network)
        self._read = _reader(encoder, model.card.kind)
        self._queue = TextQueue()
        self._calls: list[TextCall] = []
        # Texts of a failed pass, tried one by one to find the one to blame.
        self._suspects: deque[QueuedText] = deque()
        self._in_hand: Sequence[QueuedText] = ()
        self._ended: list[Answer] = []
        self._sizer = ChunkSizer(PIECE_ALONE_S, MAX_PASS_TOKENS)
        self._passes = 0
        self._read_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to do."""
        return not self._calls and not self._ended

    @property
    def checksum(self) -> int:
        """The checksum of drawn tokens; an encoder draws none."""
        return 0

    @property
    def card(self) -> ModelCard:
        """The facts about the model."""
        return self.model.card

    def obey(self, command: SessionCommand) -> None:
        """Queue the texts of a command, and refuse to generate; other commands are ignored."""
        match command:
            case Submit(request):
                self._outlets.hand_over(
                    [Publication(request.request_id, Failure.of(self._refusal()))]
                )
            case Compute():
                self._compute(command)

    def _compute(self, command: Compute) -> None:
        """Queue the texts of a command, or refuse it if this kind of model does not support it."""
        match command, self.model.card.kind:
            case Compute(EmbeddingRequest() as request, reply), ModelKind.ENCODER:
                self._add(TextCall((request,), reply, lambda results: results[0]))
            case Compute(ClassifyRequest() as request, reply), ModelKind.TAGGER:
                self._add(TextCall((request,), reply, lambda results: results[0]))
            case Compute(JudgeRequest() as request, reply), ModelKind.CROSS_ENCODER:
                self._add(TextCall(request.pairs, reply, tuple))
            case _:
                self._outlets.answer([Answer(command.reply, self._refusal())])

    def close(self) -> None:
        """Do nothing: an encoder stores nothing."""

    def pace(self) -> None:
        """Return nothing: passes do not depend on the clock."""

    def turn(self, _pace: Pace | None = None) -> None:
        """Run one pass; passes on the model's errors."""
        for call in [call for call in self._calls if call.reply.cancelled()]:
            self._end(call, None)
        if self._calls:
            self._outlets.note_pass((), has_job=True)
            self._run_pass()
        self._answer_ended()

    def recover(self, error: Exception) -> None:
        """Fail the call whose text made the last pass fail; of several texts, try each alone."""
        texts, self._in_hand = self._in_hand, ()
        if len(texts) != 1:
            log.warning("a pass of %d texts failed, they are tried alone", len(texts))
            self._suspects.extend(texts)
            return
        if not isinstance(error, BackendError):
            log.error("the model failed on a text", exc_info=error)
            error = GenerationFailedError(f"the model failed on this request: {error}")
        self._end(texts[0].call, error)
        self._answer_ended()

    def status(self) -> EngineStatus:
        """Return a snapshot."""
        return EngineStatus(
            state=EngineState.BUSY if self._calls else EngineState.READY,
            memory_bytes={
                "weights": self.model.card.weights_bytes,
                "mlx_active": mx.get_active_memory(),
                "mlx_cache": mx.get_cache_memory(),
                "mlx_peak": mx.get_peak_memory(),
            },
            metrics=zeros() | {"waiting": len(self._calls), "prompt_tokens": self._read_tokens},
        )

    def _refusal(self) -> UnsupportedError:
        card = self.model.card
        return UnsupportedError(f"{card.name} is of another kind: {card.kind.value}")

    def _add(self, call: TextCall) -> None:
        self._calls.append(call)
        self._queue.add(call)

    def _run_pass(self) -> None:
        max_tokens = self._sizer.size
        texts = [self._suspects.popleft()] if self._suspects else self._queue.take(max_tokens)
        self._in_hand = texts
        started = time.monotonic()
        results = self._read([queued.text for queued in texts])
        self._learn(texts, max_tokens, time.monotonic() - started)
        self._in_hand = ()
        for queued, result in zip(texts, results, strict=True):
            self._note(queued, result)
        self._passes += 1
        if self._passes % PASSES_PER_CLEAR == 0:
            mx.clear_cache()

    def _learn(self, texts: Sequence[QueuedText], max_tokens: int, seconds: float) -> None:
        """Record a pass for the sizer; it was full if another such text would not fit."""
        width = max(queued.length for queued in texts)
        tokens = width * len(texts)
        if tokens + width <= max_tokens:
            self._sizer.record(tokens, seconds)
        else:
            # One long text may exceed the target of a pass.
            self._sizer.record(max_tokens, seconds * min(max_tokens / tokens, 1.0))

    def _note(self, queued: QueuedText, result: object) -> None:
        self._read_tokens += queued.length
        if isinstance(result, BackendError):
            self._end(queued.call, result)
            return
        queued.call.note(queued.index, result)
        if queued.call.is_complete:
            self._end(queued.call, queued.call.answer())

    def _end(self, call: TextCall, result: object) -> None:
        if call not in self._calls:
            return
        self._calls.remove(call)
        self._queue.drop(call)
        self._suspects = deque(text for text in self._suspects if text.call is not call)
        self._ended.append(Answer(call.reply, result))

    def _answer_ended(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self._outlets.answer(ended)


def _reader(encoder: Encoder, kind: ModelKind) -> Callable[..., Sequence[object]]:
    """Return the function that reads the texts of a pass, for a kind of model."""
    match kind:
        case ModelKind.CROSS_ENCODER:
            return encoder.score_pairs
        case ModelKind.TAGGER:
            return encoder.classify
        case _:
            return encoder.embed
