"""Log-probabilities of given tokens: the prompt once, then its continuations.

Continuations run together if the model can be batched. The shorter ones are padded at the
end: a decoder does not look ahead, so nothing that counts depends on the padding.
"""

from collections.abc import Generator, Sequence
from copy import deepcopy
from math import isnan

import mlx.core as mx

from backend.cache.layers import cache_bytes
from backend.core.request import GenerationParams, GenerationRequest
from backend.core.scoring import ScoreRequest, Scores
from backend.engine.background.jobs import ChunkSize
from backend.engine.background.pooling import no_numbers
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.network import Caches, Network
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.feeder import prefill_chunk
from backend.engine.plan import Batching, BatchPlan
from backend.engine.prefixes.store import PrefixStore
from backend.engine.rows.row import Row
from backend.model.device import DEVICE
from backend.model.loaded import RunnableModel

# Tokens whose logits are in memory at once, each as wide as the vocabulary.
MAX_SCORED_TOKENS = 128
# Continuations that run together, unless copies of the prompt's caches would be too large.
MAX_TOGETHER = 16
MAX_COPIES_BYTES = 2**30
# Tokens of a group with padding, per token without.
MAX_PADDED = 1.25

"""Natural-log probabilities, per continuation and token."""


class Scorer:
    """Scores with one loaded model; belongs to the main thread."""

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: CacheFactory,
        prefixes: PrefixStore,
        chunk_size: ChunkSize,
    ) -> None:
        """Create a scorer.

        Args:
            model: Computes the scores.
            fresh_caches: Makes its caches.
            prefixes: Stores prefixes that were computed before.
            chunk_size: Returns the number of tokens of the next pass.
        """
        self._network: Network = model.network
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
        begin = self._next_logprobs([request.prompt.token_ids[-1:]], self._batch([caches]))[0, 0]
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
        rows = [[*tokens, *[0] * (width - len(tokens))] for tokens in group]
        batch = self._copies(prompt_caches, len(group))
        scored: list[list[float]] = [[] for _ in group]
        start = 0
        while left := width - 1 - start:
            yield
            count = self._chunk_size(min(left * len(group), MAX_SCORED_TOKENS))
            stop = min(start + max(count // len(group), 1), width - 1)
            logprobs = self._next_logprobs([row[start:stop] for row in rows], batch)
            targets = mx.array([row[start + 1 : stop + 1] for row in rows])
            found = mx.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0].tolist()
            for row, more in zip(scored, found, strict=True):
                row += more
            start = stop
        return [row[: len(tokens) - 1] for row, tokens in zip(scored, group, strict=True)]

    def _next_logprobs(self, rows: Sequence[Sequence[int]], batch: BatchCaches) -> mx.array:
        """Feed rows of one length; return log-probabilities [B, T, V] of the next tokens."""
        logits = batch.forward(self._network, mx.array(rows)).astype(mx.float32)
        logprobs = logits - DEVICE.log_sum_exp(logits)
        mx.eval(logprobs, [cache.state for cache in batch.layers])
        return logprobs

    def _copies(self, caches: Caches, count: int) -> BatchCaches:
        """Return a batch of `count` equal rows; the given caches stay as they are."""
        return self._batch([deepcopy(caches)] if count == 1 else [caches] * count)

    def _batch(self, rows: Sequence[Caches]) -> BatchCaches:
        # Compressed keys can only be read one token at a time.
        is_ragged = self._plan.batching is Batching.RAGGED
        batch = BatchCaches(self._plan if is_ragged else BatchPlan(Batching.PADDED))
        batch.regroup([], rows)
        return batch


def _as_generation(request: ScoreRequest) -> GenerationRequest:
    """Return the prompt as a request for prefill and prompt cache."""
    params = GenerationParams(request_id=request.request_id, remembered=request.remembered)
    return GenerationRequest(params=params, prompt=request.prompt, room=1)
