"""What the engine needs of a model and its caches, whatever upstream module they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import mlx.core as mx

Caches: TypeAlias = list[Any]
"""One upstream cache object per layer."""

FreshCaches: TypeAlias = Callable[[], Caches]
"""Makes the empty caches of one sequence."""

MODEL_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a network raises when it cannot compute with the caches it is given."""


class Network(Protocol):
    """A decoder: token ids [B, T] and the caches of what came before -> logits [B, T, V]."""

    def __call__(self, inputs: mx.array, cache: Caches) -> mx.array:
        """Append the inputs to the caches and return the logits."""
