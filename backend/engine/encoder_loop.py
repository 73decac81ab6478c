"""The loop of a model that only reads: texts of many calls, several of similar length in a pass.

The shorter ones are padded and masked: a result depends neither on padding nor on neighbours.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx
import numpy as np

from backend.core.engine_status import EngineState, EngineStatus
from backend.core.model import ModelKind
from backend.core.scoring import (
    ClassifyRequest,
    DecideRequest,
    Decision,
    Embedding,
    EmbeddingRequest,
    ExtractRequest,
    Judgement,
    JudgeRequest,
    Labels,
    Span,
    Spans,
    TokenPair,
)
from backend.engine.background.jobs import PIECE_ALONE_S
from backend.engine.background.text_queue import QueuedText, TextCall, TextQueue, padded
from backend.engine.background.work import no_numbers, pooled
from backend.engine.messages.protocol import (
    DiskChanged,
    Failure,
    Job,
    Leave,
    PrepareMedium,
    SessionRequest,
    Stop,
    Submit,
    Told,
)
from backend.engine.port import Command, Port
from backend.engine.rows.pacing import ChunkSizer, Counters
from backend.errors import BackendError, DeviceLostError, GenerationFailedError, UnsupportedError
from backend.model.checkpoint.upstream import Network
from backend.model.device import DEVICE
from backend.model.loaded import RunnableModel

if TYPE_CHECKING:
    from backend.model.deciders import Asked

# An object of mlx-vlm, untyped: with hidden states, or with logits.
Output: TypeAlias = Any


# A label that is not in a text, with a higher probability.
_ABSENT = 0.5

log = logging.getLogger(__name__)


class Encoder:
    """One loaded encoder; belongs to the main thread."""

    def __init__(self, network: Network) -> None:
        """Create an encoder, with the padding of the network.

        Args:
            network: An mlx-vlm model that reads whole texts and returns hidden states, or a label.
        """
        self._network = network
        # Any id would do, but RoBERTa counts positions by it.
        self._pad_id = int(getattr(network.config, "pad_token_id", None) or 0)
        self._reads_segments = getattr(network.config, "type_vocab_size", 1) > 1

    def look(self, token_ids: Sequence[int]) -> mx.array:
        """Return the network's output for a text: hidden states, or logits."""
        if hasattr(self._network, "encode"):
            return self._encoded([token_ids])
        if hasattr(self._network, "states"):
            ids = mx.array([token_ids])
            states: mx.array = self._network.states(ids, mx.ones_like(ids))
            return states
        output = self._run([token_ids], None)
        outputs: mx.array = getattr(output, "logits", None)
        return output.last_hidden_state if outputs is None else outputs

    def embed(
        self, requests: Sequence[EmbeddingRequest]
    ) -> list[Embedding | GenerationFailedError]:
        """Return the embeddings of texts in one pass, or their errors."""
        states = self._run([request.token_ids for request in requests], None).last_hidden_state
        return pooled(requests, states)

    def classify(self, requests: Sequence[ClassifyRequest]) -> list[Labels | GenerationFailedError]:
        """Return the log-probabilities of all labels for each token of texts in one pass."""
        rows = [request.token_ids for request in requests]
        logits = self._run(rows, None).logits.astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        found = [each[: len(row)] for each, row in zip(logprobs, rows, strict=True)]
        return [
            Labels(each.tobytes()) if np.isfinite(each).all() else no_numbers() for each in found
        ]

    def extract(self, requests: Sequence[ExtractRequest]) -> list[Spans | GenerationFailedError]:
        """Return the likely spans of texts; the labels of each are looked for by themselves."""
        states = self._encoded([request.token_ids for request in requests])
        return [self._spans(states[i : i + 1], each) for i, each in enumerate(requests)]

    def _spans(self, states: mx.array, request: ExtractRequest) -> Spans | GenerationFailedError:
        words, labels = (states[:, mx.array(at)] for at in (request.words, request.labels))
        masks = [mx.ones(each.shape[:2], dtype=mx.bool_) for each in (words, labels)]
        pool, logits, nulls = self._network.extract(words, masks[0], labels, masks[1])
        likely, absent = (mx.sigmoid(each.astype(mx.float32))[0] for each in (logits, nulls))
        probabilities = np.array(likely, np.float64)
        if not (np.isfinite(probabilities).all() and np.isfinite(np.array(absent)).all()):
            return no_numbers()
        kept = np.array(pool.mask[0])[:, None] & (np.array(absent) <= _ABSENT)
        places = np.array(pool.indices[0])
        kept &= (places[:, :1] < places[:, 1:]) & (places[:, 1:] <= len(request.words))
        found = np.argwhere(kept & (probabilities >= request.threshold)).tolist()
        rows = ((label, *places[at].tolist(), probabilities[at, label]) for at, label in found)
        return Spans(tuple(Span(q, start, stop, float(p)) for q, start, stop, p in rows))

    def decide(self, requests: Sequence[DecideRequest]) -> list[Decision | GenerationFailedError]:
        """Return the logits of the options of questions in one pass."""
        logits, act = self._network.answer(self._asked(requests))
        acts = [None] * len(requests) if act is None else act.tolist()
        found = zip(logits.astype(mx.float32).tolist(), acts, requests, strict=True)
        return [
            Decision(tuple(each[: len(request.options)]), act)
            if all(map(isfinite, [*each, act or 0.0]))
            else no_numbers()
            for each, act, request in found
        ]

    def _asked(self, requests: Sequence[DecideRequest]) -> "Asked":
        # Not for every load: a module more.
        from backend.model.deciders import Asked

        ids, mask = self._inputs([request.token_ids for request in requests])
        bounds = [list(zip(*request.options, strict=True)) for request in requests]
        starts, ends = (padded([each[side] for each in bounds]) for side in (0, 1))
        return Asked(
            ids=ids,
            mask=mask,
            options=mx.stack([starts, ends], axis=-1),
            is_option=padded([[1] * len(each.options) for each in requests]).astype(mx.bool_),
            questions=mx.array([request.question for request in requests]),
            types=[request.question_type for request in requests],
        )

    def score_pairs(self, pairs: Sequence[TokenPair]) -> list[float | GenerationFailedError]:
        """Return the logits of pairs in one pass, or their errors."""
        has_segments = self._reads_segments and all(pair.segment_ids for pair in pairs)
        segments = padded([pair.segment_ids for pair in pairs]) if has_segments else None
        output = self._run([pair.token_ids for pair in pairs], segments)
        logits: list[float] = output.logits[:, 0].astype(mx.float32).tolist()
        return [logit if isfinite(logit) else no_numbers() for logit in logits]

    def _encoded(self, rows: Sequence[Sequence[int]]) -> mx.array:
        """Return the hidden states [B, T, D] of a network that has heads of its own."""
        states: mx.array = self._network.encode(*self._inputs(rows))
        return states

    def _run(self, rows: Sequence[Sequence[int]], segments: mx.array | None) -> Output:
        ids, mask = self._inputs(rows)
        return self._network(ids, attention_mask=mask, token_type_ids=segments)

    def _inputs(self, rows: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
        """Return texts [B, T], and 1 for each of their tokens."""
        return padded(rows, self._pad_id), padded([[1] * len(row) for row in rows])


MAX_PASS_TOKENS = 8192
PASSES_PER_CLEAR = 32


class EncoderLoop:
    """An encoder at work; belongs to the main thread of its process.

    A pass takes about as long as a piece of a background job without running requests.
    """

    def __init__(self, model: RunnableModel, port: Port) -> None:
        self.model = model
        self._port = port
        self._commands: deque[Command] = deque()
        self._is_stopping = False
        self._computes, read = _WORK[model.card.kind]
        self._read = partial(read, Encoder(model.network))
        self._queue = TextQueue()
        self._calls: list[TextCall] = []
        # Texts of a failed pass, tried one by one to find the one to blame.
        self._suspects: deque[QueuedText] = deque()
        self._in_hand: Sequence[QueuedText] = ()
        self._ended: list[tuple[int, object]] = []
        self._sizer = ChunkSizer.limited(PIECE_ALONE_S, MAX_PASS_TOKENS, DEVICE.pass_limit_s)
        self._passes = 0
        self.counters = Counters()

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to do."""
        return not self._calls and not self._ended

    def run(self) -> None:
        """Run turns until told to stop."""
        while not self._is_stopping:
            self.turn()

    def turn(self) -> None:
        """Receive, run one pass, and report; a text that makes the model fail fails alone."""
        waits = self.is_idle and not self._commands
        self._commands += self._port.receive(waits=waits, timeout_s=None)
        try:
            while self._commands:
                self._obey(self._commands.popleft())
            if self._calls:
                self._port.note_pass((), has_job=True)
                self._run_pass()
        except Exception as error:  # noqa: BLE001 (models raise anything)
            self._recover(error)
        if self._ended:
            ended, self._ended = self._ended, []
            # First, because it knows which jobs have ended.
            self._port.send_status(self)
            self._port.answer(ended)
        self._port.report(self, is_idle=self.is_idle)

    def _obey(self, command: Command) -> None:
        """Queue the texts of a job, and refuse to generate; other commands are ignored."""
        match command:
            case Submit(request):
                failure = Failure.of(self._refusal())
                self._port.hand_over(Told(failures={request.request_id: failure}))
            case Job(number, request):
                self.begin_job(number, request)
            case Leave(number):
                for call in [call for call in self._calls if call.number == number]:
                    self._forget(call)
            case DiskChanged():
                self._port.send_status(self)
            case Stop():
                self._is_stopping = True

    def begin_job(self, number: int, request: SessionRequest | PrepareMedium) -> None:
        """Queue the texts of a job, or refuse it if this kind of model does not compute it."""
        if not isinstance(request, self._computes):
            self._ended.append((number, self._refusal()))
            return
        call = TextCall(number, (request,), lambda results: results[0])
        if isinstance(request, JudgeRequest):
            call = TextCall(number, request.pairs, lambda logits: Judgement(tuple(logits)))
        self._calls.append(call)
        self._queue.add(call)

    def _recover(self, error: Exception) -> None:
        """Fail the call whose text made the pass fail; of several texts, try each alone.

        Raises:
            DeviceLostError: A fresh trial fails too: no text is to blame.
        """
        try:
            mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
        except Exception as failure:  # noqa: BLE001 (upstream raises anything)
            raise DeviceLostError(f"{error}; then a trial product failed: {failure}") from error
        texts, self._in_hand = self._in_hand, ()
        if len(texts) != 1:
            told = "a pass of %d texts failed, they are tried alone"
            log.warning(told, len(texts), exc_info=error)
            self._suspects.extend(texts)
            return
        if not isinstance(error, BackendError):
            log.error("the model failed on a text", exc_info=error)
            error = GenerationFailedError.of_model(error)
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
            metrics=self.counters.values | {"waiting": len(self._calls)},
        )

    def _refusal(self) -> UnsupportedError:
        card = self.model.card
        return UnsupportedError(f"{card.name} is of another kind: {card.kind.value}")

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
        self.counters.add("prompt_tokens", queued.length)
        if isinstance(result, BackendError):
            self._end(queued.call, result)
            return
        queued.call.note(queued.index, result)
        if queued.call.is_complete:
            self._end(queued.call, queued.call.answer())

    def _end(self, call: TextCall, result: object) -> None:
        if call in self._calls:
            self._forget(call)
            self._ended.append((call.number, result))

    def _forget(self, call: TextCall) -> None:
        self._calls.remove(call)
        self._queue.drop(call)
        self._suspects = deque(text for text in self._suspects if text.call is not call)


_WORK: Mapping[ModelKind, tuple[type[Any], Callable[..., Sequence[object]]]] = {
    ModelKind.ENCODER: (EmbeddingRequest, Encoder.embed),
    ModelKind.CROSS_ENCODER: (JudgeRequest, Encoder.score_pairs),
    ModelKind.TAGGER: (ClassifyRequest, Encoder.classify),
    ModelKind.EXTRACTOR: (ExtractRequest, Encoder.extract),
    ModelKind.DECIDER: (DecideRequest, Encoder.decide),
}
"""The request that each kind of model computes, and the function that reads the texts of a pass."""
