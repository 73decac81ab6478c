"""Background work of a decoder: embeddings, and log-probabilities of given tokens.

Long texts are read in chunks, short ones of many calls together, padded at the end: a decoder does
not look ahead, so the hidden states that count do not depend on padding. This is checked once per
model.
"""

import logging
from array import array
from collections.abc import Generator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from typing import TypeAlias, assert_never

import mlx.core as mx
import numpy as np

from backend.cache.layers import cache_bytes
from backend.config import MESSAGE_LIMIT_BYTES
from backend.core.request import GenerationParams, GenerationRequest
from backend.core.scoring import (
    ClassifyRequest,
    DecideRequest,
    Embedding,
    EmbeddingRequest,
    ExtractRequest,
    JudgeRequest,
    Pooling,
    ScoreRequest,
    Scores,
)
from backend.engine.background.jobs import BackgroundJobs, ChunkSize, Job
from backend.engine.background.text_queue import gather, padded
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.messages.protocol import BackgroundRequest
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.feeder import prefill_chunk
from backend.engine.plan import MODEL_ERRORS, Batching, BatchPlan, Caches, Decoder, FreshCaches
from backend.engine.prefix_store import PrefixStore
from backend.engine.rows.row import Row
from backend.errors import GenerationFailedError, InvalidRequestError, UnsupportedError
from backend.model.device import DEVICE
from backend.model.loaded import RunnableModel

FLOAT_BYTES = 4


log = logging.getLogger(__name__)


class Pool:
    """The vectors of one text, gathered as its tokens are computed; belongs to the main thread.

    Attributes:
        vector: The pooled vector so far, lazy; `None` when nothing is pooled.
    """

    def __init__(self, request: EmbeddingRequest) -> None:
        self.vector: mx.array | None = None
        self._request = request
        self._values = array("f")
        self._dim = 0

    def add(self, states: mx.array) -> None:
        """Add the hidden states [T, D] of the next tokens; computes them if none are pooled."""
        states = states.astype(mx.float32)
        self._dim = states.shape[-1]
        match self._request.pooling:
            case Pooling.MEAN:
                total = states.sum(axis=0)
                self.vector = total if self.vector is None else self.vector + total
            case Pooling.LAST:
                self.vector = states[-1]
            case Pooling.CLS:
                self.vector = states[0] if self.vector is None else self.vector
            case Pooling.NONE:
                self._append(states)
            case _:
                assert_never(self._request.pooling)

    def finish(self) -> None:
        """Finish the requested vector, lazily, after the last tokens."""
        if self.vector is None:
            return
        if self._request.pooling is Pooling.MEAN:
            self.vector = self.vector / len(self._request.token_ids)
        if self._request.is_normalized:
            # As in torch: a vector of zeros stays one.
            self.vector = self.vector / mx.maximum(mx.linalg.norm(self.vector), 1e-12)

    def embedding(self) -> Embedding | GenerationFailedError:
        """Return the vectors, after `finish`, or an error if they are not finite.

        Raises:
            InvalidRequestError: They exceed the size of a message.
        """
        if self.vector is not None:
            self._append(self.vector)
        if not np.isfinite(np.frombuffer(self._values, np.float32)).all():
            return no_numbers()
        return Embedding(
            data=self._values.tobytes(),
            dim=self._dim,
            is_pooled=self._request.pooling is not Pooling.NONE,
            prompt_tokens=len(self._request.token_ids),
        )

    def _append(self, states: mx.array) -> None:
        count = 1 if self.vector is not None else len(self._request.token_ids)
        if count * self._dim * FLOAT_BYTES >= MESSAGE_LIMIT_BYTES:
            raise InvalidRequestError(
                "Embeddings",
                f"{count} vectors of {self._dim} numbers are more than a message of "
                f"{MESSAGE_LIMIT_BYTES} bytes holds; pool them, or send less text",
            )
        self._values.frombytes(memoryview(mx.contiguous(states)).cast("B"))


def pooled(
    requests: Sequence[EmbeddingRequest], states: mx.array
) -> list[Embedding | GenerationFailedError]:
    """Return the embeddings of texts from the hidden states [B, T, D] of all of them.

    A text with NaN or infinity gives an error; its neighbours are not affected.

    Args:
        requests: One row each, which may be longer than the text.
        states: Lazy; computed here and pooled at once.
    """
    pools = [Pool(request) for request in requests]
    for pool, row, request in zip(pools, states, requests, strict=True):
        pool.add(row[: len(request.token_ids)])
        pool.finish()
    mx.eval([pool.vector for pool in pools])
    return [pool.embedding() for pool in pools]


def no_numbers() -> GenerationFailedError:
    """Return the error of a text for which the model computes NaN or infinity."""
    return GenerationFailedError("the model computes NaN or infinity for this text")


Outcome: TypeAlias = Embedding | GenerationFailedError

_TRIAL = ((3, 1, 4), (2, 7, 1, 8, 2, 8, 1, 8))
_TOLERANCE = 0.02
# Names of the decoder in the modules of mlx-lm 0.32, wrappers of vision models outermost.
_INNER_NAMES = ("language_model", "model", "transformer", "backbone")


@dataclass(frozen=True, eq=False, slots=True)
class _Text:
    """A waiting text, and the number of its job."""

    number: int
    request: EmbeddingRequest

    @property
    def length(self) -> int:
        return len(self.request.token_ids)


@dataclass(eq=False)
class Embedder:
    """Embeds with one loaded decoder; belongs to the main thread."""

    _model: RunnableModel
    _fresh_caches: CacheFactory
    _jobs: BackgroundJobs
    _waiting: list[_Text] = field(default_factory=list)

    def embed(self, number: int, request: EmbeddingRequest) -> Generator[None, None, Outcome]:
        """Return the job of a text; an earlier job may compute it, and end it."""
        text = _Text(number, request)
        self._waiting.append(text)
        return self._job(text)

    def _job(self, text: _Text) -> Generator[None, None, Outcome]:
        self._waiting.remove(text)
        # Here, not at the job's creation: a model without hidden states fails the job.
        if self._decoder is None:
            kind = self._model.card.model_type
            raise UnsupportedError(f"Embedding: the code of {kind} gives no hidden states")
        if company := self._company(text):
            try:
                return self._together(self._decoder, text, company)
            except MODEL_ERRORS as error:
                # Each is then tried alone, in its turn.
                log.warning("a pass of %d texts failed", 1 + len(company), exc_info=error)
        return (yield from self._in_chunks(self._decoder, text.request))

    def _company(self, lead: _Text) -> Sequence[_Text]:
        """Return the calls that share the pass of one, none if it runs alone."""
        self._waiting = [each for each in self._waiting if each.number in self._jobs.jobs]
        others = [each for each in self._waiting if _is_pooled(each)]
        may_run_together = self._fresh_caches.plan.batches and self._runs_together
        if not (others and _is_pooled(lead) and may_run_together):
            return ()
        company = gather(lead, others, self._jobs.chunk_size(_padded_tokens(lead, others)))
        # The part that is actually computed.
        self._jobs.chunk_size(_padded_tokens(lead, company))
        return company

    def _together(self, decoder: Decoder, lead: _Text, company: Sequence[_Text]) -> Outcome:
        """Compute texts in one pass, end the companions' calls, and return the lead's result."""
        requests = [each.request for each in (lead, *company)]
        states = self._states(decoder, [request.token_ids for request in requests])
        embedding, *others = pooled(requests, states)
        for text, other in zip(company, others, strict=True):
            self._waiting.remove(text)
            self._jobs.conclude(text.number, other)
        return embedding

    def _in_chunks(
        self, decoder: Decoder, request: EmbeddingRequest
    ) -> Generator[None, None, Outcome]:
        """Return the embedding of a text alone; yields between forward passes."""
        caches, fed = self._fresh_caches(), 0
        token_ids, pool = request.token_ids, Pool(request)
        while fed < len(token_ids):
            if fed:
                yield
            count = self._jobs.chunk_size(len(token_ids) - fed)
            chunk = mx.array([token_ids[fed : fed + count]])
            pool.add(decoder(chunk, cache=caches)[0])
            mx.eval(pool.vector, [cache.state for cache in caches])
            fed += count
        pool.finish()
        return pool.embedding()

    @cached_property
    def _decoder(self) -> Decoder | None:
        return find_decoder(self._model.network, self._fresh_caches, self._model.card.vocab_size)

    @cached_property
    def _runs_together(self) -> bool:
        """Whether two texts of different length give the same result together as alone."""
        if self._decoder is None:
            return False
        vocab_size = self._model.card.vocab_size
        trial = [[token_id % vocab_size for token_id in tokens] for tokens in _TRIAL]
        try:
            together = self._states(self._decoder, trial)
            alone = [self._states(self._decoder, [tokens])[0] for tokens in trial]
            gaps = [_gap(row, other) for row, other in zip(together, alone, strict=True)]
        except MODEL_ERRORS as error:
            log.warning("texts are embedded one at a time: together they fail", exc_info=error)
            return False
        if max(gaps) > _TOLERANCE:
            log.warning("texts are embedded one at a time: together they differ by %.2g", max(gaps))
        return max(gaps) <= _TOLERANCE

    def _states(self, decoder: Decoder, rows: Sequence[Sequence[int]]) -> mx.array:
        """Return the hidden states [B, T, D] of whole texts."""
        return decoder(padded(rows), cache=self._fresh_caches())


def _gap(padded_states: mx.array, states: mx.array) -> float:
    """Return the relative difference of a padded text's hidden states from its own."""
    states = states.astype(mx.float32)
    gap = padded_states[: len(states)].astype(mx.float32) - states
    return float((mx.linalg.norm(gap) / mx.linalg.norm(states)).item())


def _padded_tokens(lead: _Text, company: Sequence[_Text]) -> int:
    """Return the number of tokens in a pass, padding included."""
    return max(each.length for each in (lead, *company)) * (1 + len(company))


def _is_pooled(text: _Text) -> bool:
    """Tell whether a text gives one vector: those of all tokens would be large together."""
    return text.request.pooling is not Pooling.NONE


def find_decoder(network: Decoder, fresh_caches: FreshCaches, vocab_size: int) -> Decoder | None:
    """Return the decoder that returns hidden states [B, T, D], or `None`.

    Args:
        network: Returns logits.
        vocab_size: Width of the logits: a part of this width has its own head.
    """
    part = _inner(network)
    while part is not None:
        if _width(part, fresh_caches) not in (None, vocab_size):
            return part
        part = _inner(part)
    return None


def _inner(network: Decoder) -> Decoder | None:
    parts = (getattr(network, name, None) for name in _INNER_NAMES)
    return next((part for part in parts if callable(part)), None)


def _width(part: Decoder, fresh_caches: FreshCaches) -> int | None:
    """Return the width of a part's output for a token; nothing is computed."""
    try:
        output = part(mx.array([[0]]), cache=fresh_caches())
    except MODEL_ERRORS:
        return None
    is_sequence = isinstance(output, mx.array) and output.ndim == 3
    return int(output.shape[-1]) if is_sequence else None


# Tokens whose logits are in memory at once, each as wide as the vocabulary.
MAX_SCORED_TOKENS = 128
# Continuations that run together, unless copies of the prompt's caches would be too large.
MAX_TOGETHER = 16
MAX_COPIES_BYTES = 2**30
# Tokens of a group with padding, per token without.
MAX_PADDED = 1.25


class Scorer:
    """Scores with one loaded model; belongs to the main thread."""

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: CacheFactory,
        prefixes: PrefixStore,
        chunk_size: ChunkSize,
    ) -> None:
        self._network: Decoder = model.network
        self._fresh_caches = fresh_caches
        self._plan = fresh_caches.plan
        self._prefixes = prefixes
        self._chunk_size = chunk_size

    def score(self, request: ScoreRequest) -> Generator[None, None, Scores]:
        """Return the log-probabilities of all continuations; yields between forward passes."""
        caches = yield from self._prefilled(request)
        if not request.continuations:
            return Scores(())
        self._chunk_size(1)
        # One pass for all: every continuation follows the prompt's last token.
        latest = mx.array([request.prompt.token_ids[-1:]])
        begin = self._next_logprobs(latest, self._batch([caches]))[0, 0]
        firsts = begin[mx.array([tokens[0] for tokens in request.continuations])].tolist()
        scored = [(first,) for first in firsts]
        for group in self._groups(request.continuations, caches):
            rests = yield from self._rests([request.continuations[i] for i in group], caches)
            for i, rest in zip(group, rests, strict=True):
                scored[i] += tuple(rest)
        if any(isnan(logprob) for logprobs in scored for logprob in logprobs):
            raise no_numbers()
        return Scores(tuple(scored))

    def _groups(self, continuations: Sequence[Sequence[int]], caches: Caches) -> list[list[int]]:
        """Return the groups of continuations of more than one token, by index."""
        copy_bytes = sum(map(cache_bytes, caches))
        together = MAX_TOGETHER if self._plan.batches else 1
        size = max(min(together, MAX_COPIES_BYTES // max(copy_bytes, 1)), 1)
        fed = {i: len(tokens) - 1 for i, tokens in enumerate(continuations) if len(tokens) > 1}
        groups: list[list[int]] = []
        total = 0
        for i in sorted(fed, key=fed.__getitem__):
            total += fed[i]
            count = len(groups[-1]) + 1 if groups else 0
            if groups and count <= size and fed[i] * count <= MAX_PADDED * total:
                groups[-1].append(i)
            else:
                groups.append([i])
                total = fed[i]
        return groups

    def _prefilled(self, request: ScoreRequest) -> Generator[None, None, Caches]:
        """Return caches of all but the last token of the prompt."""
        row = Row(_as_generation(request))
        try:
            self._prefixes.restore(row)
            while row.prefill_left:
                count = self._chunk_size(self._prefixes.room(row))
                prefill_chunk(self._network, self._fresh_caches, row, count)
                self._prefixes.save(row)
                yield
                self._prefixes.restore(row)
            self._prefixes.record(row)
            return row.own_caches(self._fresh_caches)
        finally:
            # Everything to store is saved: a failed pass may have left anything there.
            row.release()
            self._prefixes.leave(row)

    def _rests(
        self, group: Sequence[Sequence[int]], prompt_caches: Caches
    ) -> Generator[None, None, list[list[float]]]:
        """Score all but the first tokens of continuations, on copies of the prompt's caches."""
        width = max(map(len, group))
        rows = padded(group)
        batch = self._copies(prompt_caches, len(group))
        scored: list[list[float]] = [[] for _ in group]
        start = 0
        while left := width - 1 - start:
            yield
            count = self._chunk_size(min(left * len(group), MAX_SCORED_TOKENS))
            stop = min(start + max(count // len(group), 1), width - 1)
            logprobs = self._next_logprobs(rows[:, start:stop], batch)
            targets = rows[:, start + 1 : stop + 1, None]
            found = mx.take_along_axis(logprobs, targets, axis=-1)[..., 0].tolist()
            for row, more in zip(scored, found, strict=True):
                row += more
            start = stop
        return [row[: len(tokens) - 1] for row, tokens in zip(scored, group, strict=True)]

    def _next_logprobs(self, tokens: mx.array, batch: BatchCaches) -> mx.array:
        """Feed tokens [B, T]; return log-probabilities [B, T, V] of those that follow each."""
        logits = batch.forward(self._network, tokens).astype(mx.float32)
        logprobs = logits - DEVICE.log_sum_exp(logits)
        mx.eval(logprobs, [cache.state for cache in batch.layers])
        return logprobs

    def _copies(self, caches: Caches, count: int) -> BatchCaches:
        """Return a batch of `count` equal rows; the given caches stay as they are."""
        takes_over = count == 1 or self._plan.batching is Batching.BY_ROW
        return self._batch([deepcopy(caches) if takes_over else caches for _ in range(count)])

    def _batch(self, rows: Sequence[Caches]) -> BatchCaches:
        # Compressed keys can only be read one token at a time.
        is_latent = self._plan.batching is Batching.LATENT
        batch = BatchCaches(BatchPlan(Batching.PADDED) if is_latent else self._plan)
        batch.regroup([], rows)
        return batch


def _as_generation(request: ScoreRequest) -> GenerationRequest:
    """Return the prompt as a request for prefill and prompt cache."""
    params = GenerationParams(request_id=request.request_id, remembered=request.remembered)
    return GenerationRequest(params=params, prompt=request.prompt, room=1)


class JobFactory:
    """Makes the jobs of one loaded decoder; belongs to the main thread."""

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: CacheFactory,
        prefixes: PrefixStore,
        jobs: BackgroundJobs,
    ) -> None:
        self._embedder = Embedder(model, fresh_caches, jobs)
        self._scorer = Scorer(model, fresh_caches, prefixes, jobs.chunk_size)

    def make(self, number: int, request: BackgroundRequest) -> Job:
        """Return the job of a request; nothing is computed yet."""
        match request:
            case ScoreRequest():
                return self._scorer.score(request)
            case EmbeddingRequest():
                return self._embedder.embed(number, request)
            case ClassifyRequest() | ExtractRequest():
                return _refuse("TokenClassify: the loaded model is no token classifier")
            case DecideRequest():
                return _refuse("Score: the loaded model is no decision model")
            case JudgeRequest():
                return _refuse("Rerank: the loaded model is no cross-encoder")
            case _:
                assert_never(request)


def tokens_of(request: BackgroundRequest) -> int:
    """Return how many tokens are computed for a request."""
    match request:
        case ScoreRequest():
            return len(request.prompt.token_ids) + sum(map(len, request.continuations))
        case EmbeddingRequest():
            return len(request.token_ids)
    return 0


def _refuse(reason: str) -> Job:
    yield
    raise UnsupportedError(reason)
