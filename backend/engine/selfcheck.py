"""Find out at load time whether a model computes at all, and the same in a batch as alone.

Some families of mlx-lm 0.32 do not (wrong masks, caches without `merge`): served in a batch,
they would answer wrongly without any error.
"""

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.network import MODEL_ERRORS, Caches, FreshCaches, Network
from backend.errors import LoadError

_PROBE = (0, 1)
_PROMPT_LENGTHS = (4, 11)
_STEPS = 3
_TOLERANCE = {mx.float32: 1e-2, mx.float16: 0.1, mx.bfloat16: 0.3}


def require_numbers(network: Network, fresh_caches: FreshCaches) -> None:
    """Refuse a model that would answer every prompt with the same senseless token.

    Raises:
        LoadError: All logits are NaN.
    """
    logits = network(mx.array([_PROBE]), cache=fresh_caches())
    if mx.all(mx.isnan(logits)).item():
        raise LoadError(
            "the model computes nothing but NaN: its weights are damaged, or too large for "
            "their data type (DType takes another)"
        )


def batching_fault(network: Network, fresh_caches: FreshCaches, vocab_size: int) -> str | None:
    """Return why this model may not be batched, or `None` when it may.

    Two prompts of different length are decoded for some steps, alone and together.
    """
    prompts = [
        [(7 * i + 3 * n) % vocab_size for i in range(1, n + _STEPS + 1)] for n in _PROMPT_LENGTHS
    ]
    prefilled = [
        _prefilled(network, fresh_caches(), p[:n])
        for p, n in zip(prompts, _PROMPT_LENGTHS, strict=True)
    ]
    for cache in {type(c) for c in prefilled[0] if not hasattr(c, "merge")}:
        return f"{cache.__name__} cannot be merged"
    tails = [p[n:] for p, n in zip(prompts, _PROMPT_LENGTHS, strict=True)]
    tokens = list(zip(*tails, strict=True))
    try:
        together = _decoded_together(network, prefilled, tokens)
    except MODEL_ERRORS as error:
        return f"a batch raises {type(error).__name__}: {error}"
    return _difference(_decoded_alone(network, prefilled, tokens), together)


def _decoded_together(
    network: Network, prefilled: Sequence[Caches], tokens: Sequence[tuple[int, ...]]
) -> mx.array:
    """Return the logits [B, S, V] of one batch; merging copies, so `prefilled` stays as it is."""
    caches = [layers[0].merge(list(layers)) for layers in zip(*prefilled, strict=True)]
    steps = [_step(network, mx.array(step), caches) for step in tokens]
    return mx.stack(steps, axis=1)


def _decoded_alone(
    network: Network, prefilled: Sequence[Caches], tokens: Sequence[tuple[int, ...]]
) -> mx.array:
    """Return the logits [B, S, V] of each row by itself."""
    rows = [
        mx.concatenate([_step(network, mx.array([t]), caches) for t in row])
        for caches, row in zip(prefilled, zip(*tokens, strict=True), strict=True)
    ]
    return mx.stack(rows)


def _step(network: Network, tokens: mx.array, caches: Caches) -> mx.array:
    """Return computed logits [B, V]: ranks of a pipeline mistake each other's lazy steps."""
    logits = network(tokens[:, None], cache=caches)[:, -1]
    mx.eval(logits)
    return logits


def _difference(single: mx.array, batched: mx.array) -> str | None:
    tolerance = _TOLERANCE.get(single.dtype, max(_TOLERANCE.values()))
    gap = mx.max(mx.abs(_logprobs(batched) - _logprobs(single))).item()
    return None if gap <= tolerance else f"log-probabilities differ by {gap:.2g} in a batch"


def _prefilled(network: Network, caches: Caches, tokens: Sequence[int]) -> Caches:
    network(mx.array([tokens]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def _logprobs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
