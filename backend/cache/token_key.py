"""Token ids packed for comparison: eight bytes each, compared as memory and never one by one."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, overload

BYTES_PER_TOKEN = 8
MIN_LOST_TOKENS = 64
_RUN_TOKENS = 16
_SKIPS = (1, 2, 4, 8, 16, 32)
_REACH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TokenKey:
    """An immutable run of token ids; negative ones stand for media, such as images.

    Attributes:
        packed: The ids as signed 64-bit integers in the machine's byte order.
    """

    packed: bytes

    def __post_init__(self) -> None:
        if len(self.packed) % BYTES_PER_TOKEN:
            raise ValueError(f"{len(self.packed)} bytes are no whole number of tokens")

    @classmethod
    def from_ids(cls, ids: Sequence[int]) -> Self:
        """Pack `ids`; raise ValueError if one needs more than 64 bits."""
        try:
            return cls(array("q", ids).tobytes())
        except OverflowError as error:
            raise ValueError("a token id does not fit in 64 signed bits") from error

    @classmethod
    def concat(cls, parts: Iterable["TokenKey"]) -> Self:
        """Return the concatenation of `parts`."""
        return cls(b"".join(part.packed for part in parts))

    def __len__(self) -> int:
        return len(self.packed) // BYTES_PER_TOKEN

    def __repr__(self) -> str:
        return f"<TokenKey of {len(self)} tokens>"

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.packed).cast("q"))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "TokenKey": ...

    def __getitem__(self, index: int | slice) -> "int | TokenKey":
        tokens = memoryview(self.packed).cast("q")
        return TokenKey(tokens[index].tobytes()) if isinstance(index, slice) else tokens[index]

    def common_prefix(self, other: "TokenKey", start: int = 0) -> int:
        """Return the number of first tokens of `other` that match this key from `start` on.

        Bisects the position of the first difference. Every probe is one `memcmp` without a copy,
        and stops at that difference, so the tokens after it cost nothing.
        """
        theirs = memoryview(other.packed).cast("q")
        agreed, limit = 0, min(len(other), len(self) - start)
        probe = limit
        while agreed < limit:
            offset = (start + agreed) * BYTES_PER_TOKEN
            if self.packed.startswith(theirs[agreed:probe], offset):
                agreed = probe
            else:
                limit = probe - 1
            probe = (agreed + limit + 1) // 2
        return agreed


def agrees_again(key: TokenKey, matched: int, beyond: TokenKey) -> bool:
    """Tell whether a prompt goes on like a stored one soon after the place where they differ.

    Then something made them differ early although they are the same: a date, an id, a counter.

    Args:
        key: The prompt.
        matched: Where they differ.
        beyond: The stored tokens from there on.
    """
    if len(key) - matched < MIN_LOST_TOKENS:
        return False
    stored = beyond[:_REACH_TOKENS].packed
    runs = (key[matched + skip : matched + skip + _RUN_TOKENS] for skip in _SKIPS)
    return any(len(run) == _RUN_TOKENS and _holds(stored, run.packed) for run in runs)


def _holds(stored: bytes, run: bytes) -> bool:
    place = stored.find(run)
    while place >= 0 and place % BYTES_PER_TOKEN:
        place = stored.find(run, place + 1)
    return place >= 0
