"""Find out at load time whether a model gives the same logits in a batch as alone.

Some families of mlx-lm 0.32 do not (wrong masks, caches without `merge`): served in a batch,
they would answer wrongly without any error.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.network import Caches, Network

_PROMPT_LENGTHS = (4, 11)
_STEPS = 3
_TOLERANCE = {mx.float32: 1e-2, mx.float16: 0.1, mx.bfloat16: 0.3}


def batching_fault(network: Network, vocab_size: int) -> str | None:
    """Return why this model may not be batched, or `None` when it may.

    Two prompts of different length are decoded for some steps, alone and together.
    """
    prompts = [
        [(7 * i + 3 * n) % vocab_size for i in range(1, n + _STEPS + 1)] for n in _PROMPT_LENGTHS
    ]
    prefilled = [_prefilled(network, p[:n]) for p, n in zip(prompts, _PROMPT_LENGTHS, strict=True)]
    for cache in {type(c) for c in prefilled[0] if not hasattr(c, "merge")}:
        return f"{cache.__name__} cannot be merged"
    # Merging copies, so the single caches stay as they were.
    together = [layers[0].merge(list(layers)) for layers in zip(*prefilled, strict=True)]
    tails = [p[n:] for p, n in zip(prompts, _PROMPT_LENGTHS, strict=True)]
    for step in zip(*tails, strict=True):
        difference = _difference(network, step, prefilled, together)
        if difference:
            return difference
    return None


def _difference(
    network: Network, tokens: Sequence[int], alone: Sequence[Caches], together: Caches
) -> str | None:
    batched = network(mx.array(tokens)[:, None], cache=together)[:, -1]
    single = mx.concatenate(
        [network(mx.array([[t]]), cache=c)[:, -1] for t, c in zip(tokens, alone, strict=True)]
    )
    tolerance = _TOLERANCE.get(single.dtype, max(_TOLERANCE.values()))
    gap = mx.max(mx.abs(_logprobs(batched) - _logprobs(single))).item()
    return None if gap <= tolerance else f"log-probabilities differ by {gap:.2g} in a batch"


def _prefilled(network: Network, tokens: Sequence[int]) -> Caches:
    caches: Caches = make_prompt_cache(network)
    network(mx.array([tokens]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def _logprobs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
