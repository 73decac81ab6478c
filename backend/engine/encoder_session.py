"""A loaded encoder at work: texts of many calls, as many in a pass as are good together."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx

from backend.core.model import ModelKind
from backend.core.request import GenerationRequest
from backend.core.status import EngineState, EngineStatus
from backend.engine.command import Embed, Fetched, Judge, SideCommand, answer
from backend.engine.encoder import Encoder
from backend.engine.publisher import HandOver
from backend.engine.side_jobs import PIECE_ALONE_S, ChunkSizer
from backend.engine.stream import Publication
from backend.engine.text_queue import QueuedText, TextCall, TextQueue
from backend.errors import BackendError, GenerationFailedError, UnsupportedError
from backend.model.loaded import LoadedModel, RunnableModel

MAX_PASS_TOKENS = 8192
PASSES_PER_CLEAR = 32

log = logging.getLogger(__name__)


class EncoderSession:
    """What a `Session` is to a decoder, for a model that only reads; belongs to the engine thread.

    A pass takes about as long as a piece of work beside streams does when there are none.
    """

    def __init__(self, model: RunnableModel, hand_over: HandOver) -> None:
        """Start idle.

        Args:
            model: An encoder or a cross-encoder.
            hand_over: Takes the refusals of requests that ask for a decoder.
        """
        self.model = model
        self._hand_over = hand_over
        encoder = Encoder(model.network)
        is_judge = model.card.kind is ModelKind.CROSS_ENCODER
        self._read: Callable[..., Sequence[object]] = encoder.judge if is_judge else encoder.embed
        self._queue = TextQueue()
        self._calls: list[TextCall] = []
        # Texts of a pass that failed: tried one by one, to find the one to blame.
        self._suspects: deque[QueuedText] = deque()
        self._in_hand: Sequence[QueuedText] = ()
        self._ended: list[tuple[Future[Any], object]] = []
        self._sizer = ChunkSizer(MAX_PASS_TOKENS, PIECE_ALONE_S)
        self._passes = 0
        self._read_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to do."""
        return not self._calls and not self._ended

    @property
    def idle_timeout_s(self) -> float | None:
        """How long to wait for a command before `rest`: for ever."""
        return None

    @property
    def has_ended_aside(self) -> bool:
        """Whether answers wait for `answer_aside`."""
        return bool(self._ended)

    def plain_model(self) -> LoadedModel:
        """Return what may cross the thread line."""
        return self.model.plain()

    def submit(self, request: GenerationRequest) -> None:
        """Refuse a request to generate."""
        self._hand_over([Publication(request.request_id, self._refusal())])

    def work_aside(self, command: SideCommand) -> None:
        """Queue the texts of a command, or refuse what this kind of model does not do."""
        match command, self.model.card.kind:
            case Embed(request, reply), ModelKind.ENCODER:
                self._add(TextCall((request,), reply, lambda results: results[0]))
            case Judge(request, reply), ModelKind.CROSS_ENCODER:
                self._add(TextCall(request.pairs, reply, tuple))
            case _:
                self._ended.append((command.reply, self._refusal()))

    def answer_aside(self) -> None:
        """Hand out the answers of calls that have ended."""
        ended, self._ended = self._ended, []
        for reply, result in ended:
            answer(reply, result)

    def take_in(self, fetched: Fetched) -> None:
        """Ignore what was fetched for the model before this one."""

    def cancel(self, request_id: str) -> None:
        """Do nothing: no request to generate is ever running."""

    def rest(self) -> None:
        """Do nothing: nothing is put off."""

    def close(self) -> None:
        """End for good."""

    def fail_all(self, error: BackendError) -> None:
        """End every call with an error."""
        for call in list(self._calls):
            self._end(call, error)
        self.answer_aside()

    def turn(self) -> None:
        """Run one pass; may raise whatever a model raises, then see `recover`."""
        for call in [call for call in self._calls if call.reply.cancelled()]:
            self._end(call, None)
        if self._calls:
            self._compute()

    def recover(self, error: Exception) -> None:
        """End the call whose text the last pass failed on; of several texts, try each alone."""
        texts, self._in_hand = self._in_hand, ()
        if len(texts) != 1:
            log.warning("a pass of %d texts failed, they are tried alone", len(texts))
            self._suspects.extend(texts)
            return
        if not isinstance(error, BackendError):
            log.error("the model failed on a text", exc_info=error)
            error = GenerationFailedError(f"the model failed on this request: {error}")
        self._end(texts[0].call, error)

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
            waiting=len(self._calls),
            prompt_tokens=self._read_tokens,
        )

    def _refusal(self) -> UnsupportedError:
        card = self.model.card
        return UnsupportedError(f"{card.name} is of another kind: {card.kind.value}")

    def _add(self, call: TextCall) -> None:
        self._calls.append(call)
        self._queue.add(call)

    def _compute(self) -> None:
        max_tokens = self._sizer.chunk(MAX_PASS_TOKENS)
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
        """Tell the sizer of a pass; it was full if another such text would not have fitted."""
        width = max(queued.length for queued in texts)
        tokens = width * len(texts)
        if tokens + width <= max_tokens:
            self._sizer.record(tokens, seconds)
        else:
            # One long text may be more than a pass should be.
            self._sizer.record(max_tokens, seconds * min(max_tokens / tokens, 1.0))

    def _note(self, queued: QueuedText, result: object) -> None:
        self._read_tokens += queued.length
        queued.call.note(queued.index, result)
        if queued.call.is_complete:
            self._end(queued.call, queued.call.answer())

    def _end(self, call: TextCall, result: object) -> None:
        if call not in self._calls:
            return
        self._calls.remove(call)
        self._queue.drop(call)
        self._suspects = deque(text for text in self._suspects if text.call is not call)
        self._ended.append((call.reply, result))
