"""Random numbers of a request: pure functions of its seed and a position.

SplitMix64 (Steele, Lea, Flood 2014) serves as a hash, so a request draws the same tokens
alone, in a batch, and after a pause.
"""

_MASK = (1 << 64) - 1
_COIN_STREAM = 0xA5A5_A5A5


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit words of the MLX random key for one draw."""
    word = _hashed(seed, position)
    return word >> 32, word & 0xFFFF_FFFF


def coin(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) that is independent of the draw at this position."""
    return _hashed(seed ^ _COIN_STREAM, position) / 2.0**64


def _hashed(seed: int, position: int) -> int:
    word = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
