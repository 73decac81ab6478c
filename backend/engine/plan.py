"""The engine's interface to a model and its caches, and how its rows may be batched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import mlx.core as mx

Caches: TypeAlias = list[Any]
"""One upstream cache object per layer."""

FreshCaches: TypeAlias = Callable[[], Caches]
"""Creates the empty caches of one sequence."""

MODEL_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a network that cannot compute with its caches."""


class Decoder(Protocol):
    """A decoder: token ids [B, T] and the caches of earlier tokens -> logits [B, T, V]."""

    def __call__(self, inputs: mx.array, cache: Caches) -> mx.array:
        """Append the inputs to the caches and return the logits."""


class Batching(Enum):
    """How the layers that keep every position are batched.

    Attributes:
        RAGGED: Each row has its own length, and attention runs by group.
        LATENT: The same for families that keep compressed keys (MLA).
        PADDED: With mlx-lm's batch caches, as long as the longest row.
        BY_ROW: Each row keeps its own caches, and the attention of each runs alone.
        NONE: One row at a time.
    """

    RAGGED = "ragged"
    LATENT = "latent"
    PADDED = "padded"
    BY_ROW = "by_row"
    NONE = "none"


@dataclass(slots=True)
class BatchPlan:
    """The batching of a model, found by trials. Parts of a session share one, which may change.

    Attributes:
        batching: How its rows share a pass.
        overhead: Positions of a row that cost as much as one more group.
        shares_prefixes: Whether rows use the prompt cache in place.
        takes_several: Whether prompts of different length may be fed in one pass.
        packs: Whether decoding rows that take unlike numbers of tokens need no padding: the
            network gets each token as a row of its own.
        starts_early: Whether an idle device begins with a pass while it is being built: alone, not
            among ranks, which have to agree first.
        pass_seconds: Duration of a pass by its tokens of one row; empty if decoding rows
            cannot take several in a pass and give some back.
    """

    batching: Batching = Batching.RAGGED
    overhead: float = 512.0
    shares_prefixes: bool = False
    takes_several: bool = False
    packs: bool = False
    starts_early: bool = False
    pass_seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def batches(self) -> bool:
        """Whether several rows may share a pass."""
        return self.batching is not Batching.NONE

    @property
    def has_own_lengths(self) -> bool:
        """Whether every row has its own length."""
        return self.batching in (Batching.RAGGED, Batching.LATENT, Batching.BY_ROW)

    def become(self, other: BatchPlan) -> None:
        """Take over all values of another plan."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))
