"""Finds the part of a network before the head, whose output embeddings are made of."""

import mlx.core as mx

from backend.engine.network import MODEL_ERRORS, FreshCaches, Network

# Names of the decoder in the modules of mlx-lm 0.32, wrappers of vision models outermost.
_INNER_NAMES = ("language_model", "model", "transformer", "backbone")


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
