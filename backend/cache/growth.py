"""How the caches of mlx-lm and mlx-vlm grow with the tokens of a sequence."""

from dataclasses import dataclass

ALLOCATION_STEP_TOKENS = 256
"""Caches of positions are allocated in steps of so many tokens."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one layer's cache.

    Attributes:
        bytes_per_token: Of each position that it holds; 0 for a state of one size.
        window: Positions that it holds at most; 0 is all.
        fixed_bytes: Of a state, however long the sequence is.
    """

    bytes_per_token: int = 0
    window: int = 0
    fixed_bytes: int = 0
