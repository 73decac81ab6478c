"""Checks at load whether a model computes at all."""

from collections.abc import Collection, Sequence

import mlx.core as mx

from backend.engine.network import FreshCaches, Network
from backend.errors import LoadError

_CAUSES = "its weights are damaged, or config.json does not describe them"
SHORT_PROMPTS = (4, 11)


def require_sense(network: Network, fresh_caches: FreshCaches, token_ids: Sequence[int]) -> None:
    """Refuse a model that would answer every prompt with the same meaningless token.

    Args:
        network: The model.
        fresh_caches: Creates the caches of one sequence.
        token_ids: A short prompt of different tokens.

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
