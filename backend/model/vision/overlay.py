"""Bidirectional attention within a picture, for mlx-vlm 0.7's models that would see a part of it.

Their own code only applies it to square masks, and silently omits it if a picture is fed after
other tokens.
"""

from types import MethodType

import mlx.core as mx

from backend.model.checkpoint.upstream import Network

_OVERLAY = "_apply_blockwise_bidirectional_overlay"


def mend(language_model: Network) -> None:
    """Let a language model see whole pictures even after cached tokens."""
    decoder = getattr(language_model, "model", None)
    if hasattr(decoder, _OVERLAY):
        setattr(decoder, _OVERLAY, MethodType(_overlaid, decoder))


def _overlaid(decoder: Network, mask: mx.array, token_types: mx.array | None) -> mx.array:
    """Return a mask [..., T, S] in which the last T keys of each picture see each other.

    Args:
        decoder: The decoder that the mask is for.
        mask: True where a query may look; the last T of S keys are the queries' own.
        token_types: 1 and 2 for tokens of pictures and videos, [B, T].
    """
    queries = mask.shape[-2]
    if token_types is None or token_types.shape[1] != queries:
        return mask
    blocks = decoder._block_sequence_ids_for_mask(token_types)  # noqa: SLF001 (upstream's own)
    same = (blocks[:, :, None] != -1) & (blocks[:, :, None] == blocks[:, None, :])
    earlier = mx.zeros((*same.shape[:2], mask.shape[-1] - queries), mx.bool_)
    return mask | mx.concatenate([earlier, same], axis=-1)[:, None]
