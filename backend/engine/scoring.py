"""Log-probabilities of given tokens: the prompt once, then every continuation behind it."""

from collections.abc import Generator, Sequence
from copy import deepcopy
from typing import TypeAlias

import mlx.core as mx

from backend.core.request import GenerationRequest, SamplingParams
from backend.core.scoring import ScoreRequest
from backend.engine.keeper import Keeper
from backend.engine.network import Caches, FreshCaches, Network
from backend.engine.prefill import prefill_chunk
from backend.engine.row import Row
from backend.engine.side_jobs import ChunkSize

# The logits of so many tokens are in memory at once, each as wide as the vocabulary.
MAX_SCORED_TOKENS = 128

Logprobs: TypeAlias = tuple[tuple[float, ...], ...]
"""Natural-log probabilities, per continuation and token."""


class Scorer:
    """Scores with one loaded model; belongs to the engine thread."""

    def __init__(
        self, network: Network, fresh_caches: FreshCaches, keeper: Keeper, chunk_size: ChunkSize
    ) -> None:
        """Prepare.

        Args:
            network: The model.
            fresh_caches: Makes its caches.
            keeper: Knows prefixes that were computed before.
            chunk_size: Says how many tokens the next pass takes.
        """
        self._network = network
        self._fresh_caches = fresh_caches
        self._keeper = keeper
        self._chunk_size = chunk_size

    def score(self, request: ScoreRequest) -> Generator[None, None, Logprobs]:
        """Return the log-probabilities of all continuations; yields between forward passes."""
        caches = yield from self._prefilled(request)
        if not request.continuations:
            return ()
        # One pass for all: every continuation begins behind the prompt's last token.
        begin = self._next_logprobs(request.prompt.token_ids[-1:], caches)
        firsts = begin[0, mx.array([tokens[0] for tokens in request.continuations])].tolist()
        scored = []
        for first, tokens in zip(firsts, request.continuations, strict=True):
            rest = yield from self._rest(tokens, caches)
            scored.append((first, *rest))
        return tuple(scored)

    def _prefilled(self, request: ScoreRequest) -> Generator[None, None, Caches]:
        """Return caches of all but the last token of the prompt."""
        row = Row(_as_generation(request))
        try:
            self._keeper.restore(row)
            while row.prefill_left:
                count = self._chunk_size(self._keeper.room(row))
                prefill_chunk(self._network, self._fresh_caches, row, count)
                self._keeper.save(row)
                yield
                self._keeper.restore(row)
            self._keeper.record(row)
            return self._fresh_caches() if row.cache is None else row.cache
        finally:
            # What is to be stored was saved: a failed pass may have left anything there.
            row.cache = None
            self._keeper.leave(row)

    def _rest(
        self, tokens: Sequence[int], prompt_caches: Caches
    ) -> Generator[None, None, list[float]]:
        """Score all but the first of a continuation's tokens, on a copy of the prompt's caches."""
        scored: list[float] = []
        caches = deepcopy(prompt_caches) if len(tokens) > 1 else []
        while left := len(tokens) - 1 - len(scored):
            yield
            start = len(scored)
            stop = start + self._chunk_size(min(left, MAX_SCORED_TOKENS))
            logprobs = self._next_logprobs(tokens[start:stop], caches)
            targets = mx.array(tokens[start + 1 : stop + 1])[:, None]
            scored += mx.take_along_axis(logprobs, targets, axis=-1)[:, 0].tolist()
        return scored

    def _next_logprobs(self, tokens: Sequence[int], caches: Caches) -> mx.array:
        """Feed tokens and return log-probabilities [T, V] of what follows each of them."""
        logits = self._network(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs, [cache.state for cache in caches])
        return logprobs


def _as_generation(request: ScoreRequest) -> GenerationRequest:
    """Return the request as which the prompt passes through prefill and prompt cache."""
    return GenerationRequest(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=SamplingParams(),
        max_tokens=1,
        stop_token_ids=frozenset(),
        remembered=request.remembered,
    )
