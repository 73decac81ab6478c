"""How the caches of mlx-lm and mlx-vlm grow with the tokens of a sequence."""

from dataclasses import dataclass

ALLOCATION_STEP_TOKENS = 256
"""Caches of positions grow in steps of this many tokens."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one layer's cache.

    Attributes:
        bytes_per_token: Bytes per position; 0 for a state of fixed size.
        window: Maximum number of positions; 0 for all.
        fixed_bytes: Bytes of a state, whatever the length of the sequence.
    """

    bytes_per_token: int = 0
    window: int = 0
    fixed_bytes: int = 0
