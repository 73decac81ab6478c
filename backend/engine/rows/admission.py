"""Whether the KV caches of requests fit into memory: pure policy, without MLX.

Rows that decode together have their own lengths and are charged them. In families that mlx-lm pads
to the longest row, each row is charged the longest.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backend.cache.growth import ALLOCATION_STEP_TOKENS
from backend.engine.rows.row import Row
from backend.errors import OverloadedError

# By how much what was expected of a request is raised each time that it generates more.
EXTENSION_SHARE = 0.25

# A row shares a buffer with rows a little longer than it, and with room for the next positions.
PADDING_SHARE = 1 / 16

_ENDLESS = 2**40
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class WindowProfile:
    """Layers that keep the latest `size` positions."""

    bytes_per_token: int
    size: int


@dataclass(frozen=True, slots=True)
class KvProfile:
    """What the caches of one sequence take, over all layers.

    Attributes:
        bytes_per_token: Of layers that keep every position.
        fixed_bytes: Of recurrent states.
        windows: Layers that keep some positions.
        has_own_lengths: Whether rows that decode together keep their own lengths.
    """

    bytes_per_token: int = 0
    fixed_bytes: int = 0
    windows: tuple[WindowProfile, ...] = ()
    has_own_lengths: bool = False

    def batch_bytes(self, tokens: Sequence[int]) -> int:
        """Return what the caches of rows take at most that decode together.

        Args:
            tokens: Of each row.
        """
        if not tokens:
            return 0
        padded = len(tokens) * self.row_bytes(max(tokens))
        if len(tokens) == 1 or not self.has_own_lengths:
            return padded
        shared = padded - len(tokens) * self.bytes_per_token * _room(max(tokens))
        own = sum(_room(count) + math.ceil(PADDING_SHARE * count) for count in tokens)
        return min(padded, shared + own * self.bytes_per_token)

    def row_bytes(self, tokens: int) -> int:
        """Return what caches of so many tokens take at most: they are allocated in steps."""
        room = _room(tokens)
        windows = sum(min(room, layer.size) * layer.bytes_per_token for layer in self.windows)
        return self.fixed_bytes + room * self.bytes_per_token + windows

    def max_tokens(self, budget_bytes: int) -> int:
        """Return how many tokens one sequence may have; below 0 when not even none fit."""
        return bisect_right(range(_ENDLESS), budget_bytes, key=self.row_bytes) - 1


class Reservations:
    """How many tokens each running row may come to hold; belongs to the main thread.

    A row that states a limit is counted with all of it. One that may go on up to the context is
    counted with what it is likely to need, and asks for more when it decodes beyond.

    Attributes:
        budget_bytes: What all of them may take.
        most_tokens: What a row may hold that is alone.
    """

    def __init__(self, profile: KvProfile, budget_bytes: int, expected_tokens: int) -> None:
        """Start empty.

        Args:
            profile: What a sequence takes.
            budget_bytes: What all rows together may take.
            expected_tokens: What a row is likely to generate that states no limit.
        """
        self.budget_bytes = budget_bytes
        self.most_tokens = profile.max_tokens(budget_bytes)
        self._profile = profile
        self._expected_tokens = expected_tokens
        self._extension_tokens = math.ceil(EXTENSION_SHARE * expected_tokens)
        self._tokens: dict[Row, int] = {}

    @property
    def reserved_bytes(self) -> int:
        """What the running rows may come to take."""
        return self._bytes_of(self._tokens.values())

    @property
    def left_bytes(self) -> int:
        """What of the budget nobody has reserved."""
        return self.budget_bytes - self.reserved_bytes

    def require_fit(self, row: Row) -> None:
        """Refuse a row that would not fit if it were alone.

        Raises:
            OverloadedError: Holds the numbers.
        """
        prompt_tokens = len(row.request.prompt.token_ids)
        generated = 1 if row.request.is_open_ended else row.request.max_tokens
        if prompt_tokens + generated <= self.most_tokens:
            return
        needed = self._profile.row_bytes(prompt_tokens + generated)
        raise OverloadedError(
            f"the KV cache of {prompt_tokens} prompt tokens and {generated} generated ones "
            f"takes {needed / _MIB:.1f} MiB, and there are {self.budget_bytes / _MIB:.1f} MiB: "
            f"room for {max(self.most_tokens, 0)} tokens"
        )

    def reserve(self, row: Row) -> bool:
        """Reserve what a row needs to run, if there is room; one that is alone takes what fits."""
        generated = row.request.max_tokens - row.generated
        if row.request.is_open_ended:
            generated = min(generated, self._expected_tokens)
        return self._set(row, len(row.token_ids) + generated)

    def extend(self, row: Row) -> bool:
        """See that a row has reserved what its next step adds; false when there is no room."""
        if row.fed < self._tokens[row]:
            return True
        return self._set(row, row.fed + self._extension_tokens) and row.fed < self._tokens[row]

    def release(self, row: Row) -> None:
        """Give back what a row has reserved; no effect on one that has nothing."""
        self._tokens.pop(row, None)

    def is_alone(self, row: Row) -> bool:
        """Tell whether nobody else has reserved anything."""
        return self._tokens.keys() <= {row}

    def check(self, running: Iterable[Row]) -> None:
        """Raise AssertionError unless just these rows have reserved, within the budget."""
        if self._tokens.keys() != set(running):
            raise AssertionError("rows run without a reservation, or have one and do not run")
        if self.reserved_bytes > self.budget_bytes:
            raise AssertionError("more is reserved than there is")

    def _set(self, row: Row, tokens: int) -> bool:
        if self.is_alone(row):
            tokens = min(tokens, self.most_tokens)
        others = (count for other, count in self._tokens.items() if other is not row)
        if self._bytes_of([tokens, *others]) > self.budget_bytes:
            return False
        self._tokens[row] = tokens
        return True

    def _bytes_of(self, counts: Iterable[int]) -> int:
        return self._profile.batch_bytes(list(counts))


def _room(tokens: int) -> int:
    """Return for how many positions a row's caches have room at most."""
    return tokens + ALLOCATION_STEP_TOKENS
