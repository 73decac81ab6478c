"""Computes embeddings with a decoder: long texts in chunks, short texts of many calls together.

Texts in a pass are padded at the end: a decoder does not look ahead, so the hidden states that
count do not depend on padding. This is checked once per model.
"""

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import mlx.core as mx

from backend.core.embedding import Embedding, EmbeddingRequest, Pooling
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.background.pooling import Pool, pooled
from backend.engine.background.text_queue import gather, padded
from backend.engine.network import MODEL_ERRORS, FreshCaches, Network
from backend.engine.passes.caches import CacheFactory
from backend.errors import GenerationFailedError, UnsupportedError
from backend.model.loaded import RunnableModel

Outcome: TypeAlias = Embedding | GenerationFailedError

_TRIAL = ((3, 1, 4), (2, 7, 1, 8, 2, 8, 1, 8))
_TOLERANCE = 0.02
# Names of the decoder in the modules of mlx-lm 0.32, wrappers of vision models outermost.
_INNER_NAMES = ("language_model", "model", "transformer", "backbone")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Text:
    """A waiting text, and the number of its job."""

    number: int
    request: EmbeddingRequest

    @property
    def length(self) -> int:
        """Its number of tokens."""
        return len(self.request.token_ids)


class Embedder:
    """Embeds with one loaded decoder; belongs to the main thread."""

    def __init__(
        self, model: RunnableModel, fresh_caches: CacheFactory, jobs: BackgroundJobs
    ) -> None:
        """Create an embedder.

        Args:
            model: Computes the hidden states to pool.
            fresh_caches: Makes its caches.
            jobs: The queue of the texts: a pass ends the jobs of all texts that it computes.
        """
        self._model = model
        self._fresh_caches = fresh_caches
        self._jobs = jobs
        self._waiting: list[_Text] = []

    def embed(self, number: int, request: EmbeddingRequest) -> Generator[None, None, Outcome]:
        """Return the job of a text; an earlier job may compute it, and end it."""
        text = _Text(number, request)
        self._waiting.append(text)
        return self._job(text)

    def _job(self, text: _Text) -> Generator[None, None, Outcome]:
        # Here, not at the job's creation: a model without hidden states fails the job.
        if self._decoder is None:
            kind = self._model.card.model_type
            raise UnsupportedError(f"Embedding: the code of {kind} gives no hidden states")
        self._waiting.remove(text)
        if company := self._company(text):
            try:
                return self._together(self._decoder, text, company)
            except MODEL_ERRORS as error:
                # Each is then tried alone, in its turn.
                log.warning("a pass of %d texts failed", 1 + len(company), exc_info=error)
        return (yield from self._in_chunks(self._decoder, text.request))

    def _company(self, lead: _Text) -> Sequence[_Text]:
        """Return the calls that share the pass of one, none if it runs alone."""
        self._waiting = [each for each in self._waiting if self._jobs.holds(each.number)]
        others = [each for each in self._waiting if _is_pooled(each)]
        if not others or not _is_pooled(lead) or not self._may_run_together:
            return ()
        company = gather(lead, others, self._jobs.chunk_size(_padded_tokens(lead, others)))
        # The part that is actually computed.
        self._jobs.chunk_size(_padded_tokens(lead, company))
        return company

    def _together(self, decoder: Network, lead: _Text, company: Sequence[_Text]) -> Outcome:
        """Compute texts in one pass, end the companions' calls, and return the lead's result."""
        requests = [each.request for each in (lead, *company)]
        states = self._states(decoder, [request.token_ids for request in requests])
        embedding, *others = pooled(requests, states)
        for text, other in zip(company, others, strict=True):
            self._waiting.remove(text)
            self._jobs.conclude(text.number, other)
        return embedding

    def _in_chunks(
        self, decoder: Network, request: EmbeddingRequest
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
    def _decoder(self) -> Network | None:
        return find_decoder(self._model.network, self._fresh_caches, self._model.card.vocab_size)

    @property
    def _may_run_together(self) -> bool:
        return self._fresh_caches.plan.batches and self._runs_together

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

    def _states(self, decoder: Network, rows: Sequence[Sequence[int]]) -> mx.array:
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


def find_decoder(network: Network, fresh_caches: FreshCaches, vocab_size: int) -> Network | None:
    """Return the decoder that returns hidden states [B, T, D], or `None`.

    Args:
        network: Returns logits.
        fresh_caches: Makes its caches.
        vocab_size: Width of the logits: a part of this width has its own head.
    """
    part = _inner(network)
    while part is not None:
        if _width(part, fresh_caches) not in (None, vocab_size):
            return part
        part = _inner(part)
    return None


def _inner(network: Network) -> Network | None:
    parts = (getattr(network, name, None) for name in _INNER_NAMES)
    return next((part for part in parts if callable(part)), None)


def _width(part: Network, fresh_caches: FreshCaches) -> int | None:
    """Return the width of a part's output for a token; nothing is computed."""
    try:
        output = part(mx.array([[0]]), cache=fresh_caches())
    except MODEL_ERRORS:
        return None
    is_sequence = isinstance(output, mx.array) and output.ndim == 3
    return int(output.shape[-1]) if is_sequence else None
