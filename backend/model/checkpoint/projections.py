"""The keys and values that attention of glm5_next projects from its latents, and keeps.

Upstream keeps them in a `KVCache` beside the latents, but projects only in passes of several
tokens. So they end anywhere before the latents: they cannot be stored with these, and in a batch
they are those of other positions.
"""

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from mlx_lm.models.cache import KVCache

from backend.model.checkpoint.upstream import Network, derived

# Upstream's own values.
Untyped: TypeAlias = Any


class Projections(KVCache):  # type: ignore[misc]  # (mlx-lm is untyped)
    """The projections of a row's first positions, made anew where they are missing.

    Those of several rows are never kept.

    Attributes:
        is_derived: All of it follows from another cache.
    """

    is_derived = True

    @classmethod
    def merge(cls, _caches: Sequence["Projections"]) -> "Projections":
        """Return an empty cache for a batch."""
        return cls()

    def filter(self, _staying: Sequence[int]) -> None:
        """Keep some rows."""

    def extend(self, _other: "Projections") -> None:
        """Append rows."""

    def extract(self, _row: int) -> "Projections":
        """Return an empty cache for a row."""
        return type(self)()


def keep_by_row(model: Network) -> None:
    """Let each row keep its own projections, whatever it was fed before."""
    decoder = model.language_model
    for layer in decoder.layers:
        if not layer.is_linear:
            layer.self_attn.__class__ = projecting(type(layer.self_attn))
    decoder.__class__ = _keeping(type(decoder))


def projecting(kind: Untyped) -> type:
    """Return a class of glm5_next's attention that makes the projections that a row lacks."""
    upstream = sys.modules[kind.__module__]
    shortest, longest = upstream.DECODE_BLOCK_SIZE + 1, upstream._MAX_PROJECTED_PREFILL_TOKENS  # noqa: SLF001

    def attend(self: Untyped, *arguments: Untyped) -> Untyped:
        q, latent, new_latent, topk, keys, projected, *others = arguments
        is_read = q.shape[2] >= shortest and latent.shape[2] <= longest
        if q.shape[0] > 1:
            projected = None
        elif projected is not None and is_read:
            _complete(self, latent[:, :, : -q.shape[2]], projected)
        return kind._attend(self, q, latent, new_latent, topk, keys, projected, *others)  # noqa: SLF001

    return derived(kind, _attend=attend)


def _complete(attention: Network, latents: Untyped, projected: Projections) -> None:
    """Let a row have the projections of exactly these positions [1, 1, S, n]."""
    missing = latents[:, :, projected.offset :]
    if missing.shape[2]:
        keys, values = attention.embed_q(missing, transpose=False), attention.unembed_out(missing)
        projected.update_and_fetch(keys, values)


def _keeping(kind: Untyped) -> type:
    """Return a class of decoders whose fresh caches keep projections by row."""

    def make_cache(self: Untyped) -> list[Untyped]:
        caches: list[Untyped] = kind.make_cache(self)
        for layer, own in zip(self.layers, caches, strict=True):
            if not layer.is_linear:
                own.caches = (*own.caches[:-1], Projections())
        return caches

    return derived(kind, make_cache=make_cache)
