"""Computes tokens for a trial and compares results; checks whether a model computes at all."""

import math
import time
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import TypeAlias, TypeVar

import mlx.core as mx

from backend.engine.passes.agreement import Ranks
from backend.engine.plan import Caches, Decoder, FreshCaches
from backend.engine.rows.pacing import ChunkSizer
from backend.errors import LoadError
from backend.model.device import DEVICE

_CHUNK_TOKENS = 512
_TOLERANCE = {mx.float32: 1e-2, mx.float16: 0.1, mx.bfloat16: 0.3}


Result = TypeVar("Result")
Pieces: TypeAlias = Generator[None, None, Result]
"""A trial in pieces: it computes at most one pass, yields, and returns its result."""


def at_once(pieces: Generator[object, None, Result]) -> Result:
    """Compute all pieces of a trial, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


def cut(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` ids from `start` on, starting over after the last."""
    return list(islice(cycle(token_ids), start, start + count))


def computed(ranks: Ranks, build: Callable[[], mx.array]) -> mx.array:
    """Compute a step at once: ranks of a pipeline would mix up lazy steps.

    Args:
        ranks: The ranks of the model; if one cannot build the graph, none computes it.
        build: Returns the lazy logits; raises one of `MODEL_ERRORS`.
    """
    logits = ranks.attempt(build)
    mx.eval(logits)
    return logits


def prefilled(
    ranks: Ranks, network: Decoder, caches: Caches, tokens: Sequence[int]
) -> Pieces[Caches]:
    """Append tokens to caches, and return the caches."""
    limit_s = DEVICE.pass_limit_s
    sizer = ChunkSizer.limited(limit_s, _CHUNK_TOKENS, limit_s)
    # Ranks compute the same passes, whatever time each takes.
    is_timed, start = not (ranks.are_several or math.isinf(limit_s)), 0
    while start < len(tokens):
        chunk = tokens[start : start + (sizer.size if is_timed else _CHUNK_TOKENS)]
        began = time.monotonic()
        ranks.attempt(partial(network, mx.array([chunk]), cache=caches))
        mx.eval([cache.state for cache in caches])
        if is_timed:
            sizer.record(len(chunk), time.monotonic() - began)
        start += len(chunk)
        yield
    return caches


def difference(
    expected: Sequence[mx.array], found: Sequence[mx.array], noise: float = 0.0
) -> str | None:
    """Return the difference of log-probabilities as text, or `None` if rounding explains it.

    NaN differs from everything; a token that both rule out is equal in both.

    Args:
        expected: Logits [..., V] of each row.
        noise: A difference that is explained too.
    """
    largest = largest_gap(expected, found)
    precision = DEVICE.precision(expected[0].dtype)
    tolerance = _TOLERANCE.get(precision, max(_TOLERANCE.values()))
    is_near = largest <= max(tolerance, noise) < math.inf
    return None if is_near else f"log-probabilities differ by {largest:.2g}"


def largest_gap(expected: Sequence[mx.array], found: Sequence[mx.array]) -> float:
    """Return the largest difference of log-probabilities; see `difference` for the arguments."""
    return max(_gap(a, b) for a, b in zip(expected, found, strict=True))


def _gap(one: mx.array, other: mx.array) -> float:
    ours, theirs = _logprobs(one), _logprobs(other)
    gaps = mx.where(ours == theirs, 0.0, mx.abs(ours - theirs))
    gap: float = mx.max(mx.where(mx.isnan(gaps), math.inf, gaps)).item()
    return gap


def _logprobs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


_CAUSES = "its weights are damaged, or config.json does not describe them"
SHORT_PROMPTS = (4, 11)
# Of a text that shows whether a model makes sense.
PROBE_TOKENS = 8


def require_sense(network: Decoder, fresh_caches: FreshCaches, token_ids: Sequence[int]) -> None:
    """Refuse a model that would answer every prompt with the same meaningless token.

    Raises:
        LoadError: Logits are not finite, equal for all tokens, or equal after every token.
    """
    logits = network(mx.array([token_ids]), cache=fresh_caches())[0].astype(mx.float32)
    # Some models give -inf to vocabulary rows without a token.
    require_numbers(mx.where(logits == -mx.inf, 0.0, logits))
    if mx.all(mx.max(logits, axis=-1) == mx.min(logits, axis=-1)).item():
        raise LoadError(f"the model gives every token the same chance: {_CAUSES}")
    if len(set(token_ids)) > 1 and mx.all(logits == logits[:1]).item():
        raise LoadError(f"the model says the same whatever it is told: {_CAUSES}")


def require_numbers(outputs: mx.array) -> None:
    """Refuse a model whose outputs for a text are not finite.

    Args:
        outputs: Logits or hidden states.

    Raises:
        LoadError: One of them is infinite or NaN.
    """
    if not mx.all(mx.isfinite(outputs)).item():
        raise LoadError(
            f"the model computes NaN or infinity: {_CAUSES}, or too large for their data type "
            "(DType takes another)"
        )


def trial_lengths(spans: Collection[int]) -> tuple[int, ...]:
    """Return the lengths of prompts that test every window and block of a model.

    Two of them are longer than the widest, by counts that no block divides: if the model mistakes
    padding for tokens, a mask that is right for one row is then wrong for the other.

    Args:
        spans: The reach of windows, blocks and the choice of blocks, in tokens.
    """
    if not spans:
        return SHORT_PROMPTS
    first = max(spans) + min(spans) // 2 + SHORT_PROMPTS[0]
    second = first + max(spans) // 4 + min(spans) // 2 + 1
    return (*SHORT_PROMPTS[:1], first, second)
