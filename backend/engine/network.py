"""The engine's interface to a model and its caches, of any upstream module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import mlx.core as mx

Caches: TypeAlias = list[Any]
"""One upstream cache object per layer."""

FreshCaches: TypeAlias = Callable[[], Caches]
"""Creates the empty caches of one sequence."""

MODEL_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a network that cannot compute with its caches."""


class Network(Protocol):
    """A decoder: token ids [B, T] and the caches of earlier tokens -> logits [B, T, V]."""

    def __call__(self, inputs: mx.array, cache: Caches) -> mx.array:
        """Append the inputs to the caches and return the logits."""
