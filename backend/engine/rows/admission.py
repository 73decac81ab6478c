"""Whether the KV caches of requests fit into memory: pure policy, without MLX.

Rows that decode together have their own lengths and are charged them. In families that mlx-lm pads
to the longest row, each row is charged the longest. What rows use of the prompt cache where it
lies is charged once.
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
class Sharing:
    """What a row would use of the prompt cache, in place.

    Attributes:
        tokens: Its first positions.
        used_tokens: Tokens of the prompt cache that would then be in use by any row, counted once.
    """

    tokens: int = 0
    used_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvProfile:
    """What the caches of one sequence take, over all layers.

    Attributes:
        bytes_per_token: Of layers that keep every position.
        fixed_bytes: Of recurrent states.
        windows: Layers that keep some positions.
        has_own_lengths: Whether rows that decode together keep their own lengths.
        draft: What the caches of a draft model take besides, which share nothing.
    """

    bytes_per_token: int = 0
    fixed_bytes: int = 0
    windows: tuple[WindowProfile, ...] = ()
    has_own_lengths: bool = False
    draft: "KvProfile | None" = None

    def batch_bytes(self, tokens: Sequence[int], shared: Sequence[int] = ()) -> int:
        """Return what the caches of rows take at most that decode together.

        Args:
            tokens: Of each row.
            shared: How many of them lie in the prompt cache and are not counted; none at all if
                left out.
        """
        drafting = self.draft.batch_bytes(tokens) if self.draft else 0
        return drafting + self._own_batch_bytes(tokens, shared)

    def row_bytes(self, tokens: int) -> int:
        """Return what caches of so many tokens take at most: they are allocated in steps."""
        return self._own_row_bytes(tokens) + (self.draft.row_bytes(tokens) if self.draft else 0)

    def max_tokens(self, budget_bytes: int) -> int:
        """Return how many tokens one sequence may have; below 0 when not even none fit."""
        return bisect_right(range(_ENDLESS), budget_bytes, key=self.row_bytes) - 1

    def _own_batch_bytes(self, tokens: Sequence[int], shared: Sequence[int]) -> int:
        if not tokens:
            return 0
        padded = len(tokens) * self._own_row_bytes(max(tokens))
        if len(tokens) == 1 or not self.has_own_lengths:
            return padded - sum(shared) * self.bytes_per_token
        fixed = padded - len(tokens) * self.bytes_per_token * _room(max(tokens))
        tails = [
            count - own for count, own in zip(tokens, shared or [0] * len(tokens), strict=True)
        ]
        own = sum(_room(count) + math.ceil(PADDING_SHARE * count) for count in tails)
        return min(padded, fixed + own * self.bytes_per_token)

    def _own_row_bytes(self, tokens: int) -> int:
        room = _room(tokens)
        windows = sum(min(room, layer.size) * layer.bytes_per_token for layer in self.windows)
        return self.fixed_bytes + room * self.bytes_per_token + windows


class Reservations:
    """How many tokens each running row may come to hold; belongs to the main thread.

    A row that states a limit is counted with all of it. One that may go on up to the context is
    counted with what it is likely to need, and asks for more when it decodes beyond.

    Attributes:
        wish_bytes: What the budget is unless other backends need memory.
        budget_bytes: What all of them may take.
        most_tokens: What a row may hold that is alone.
        used_tokens: Tokens of the prompt cache that rows use in place, each counted once.
    """

    def __init__(self, profile: KvProfile, budget_bytes: int, expected_tokens: int) -> None:
        """Start empty.

        Args:
            profile: What a sequence takes.
            budget_bytes: What all rows together may take.
            expected_tokens: What a row is likely to generate that states no limit.
        """
        self.wish_bytes = budget_bytes
        self.used_tokens = 0
        self._profile = profile
        self._goal_bytes = self._attainable_bytes = budget_bytes
        self._set_budget(budget_bytes)
        self._wish_tokens = self.most_tokens
        self._expected_tokens = expected_tokens
        self._extension_tokens = math.ceil(EXTENSION_SHARE * expected_tokens)
        self._tokens: dict[Row, int] = {}

    @property
    def reserved_bytes(self) -> int:
        """What the running rows may come to take by themselves."""
        rows = [(count, row.shared) for row, count in self._tokens.items()]
        return self._bytes_of(rows)

    @property
    def shared_bytes(self) -> int:
        """What rows use of the prompt cache, in place."""
        return self.used_tokens * self._profile.bytes_per_token

    @property
    def left_bytes(self) -> int:
        """What of the budget nobody has reserved: what is shared is a part of it."""
        return max(self.budget_bytes - self.reserved_bytes, 0)

    @property
    def is_exceeded(self) -> bool:
        """Whether several rows have more than there is, because a prefix was lost or has grown."""
        taken = self.reserved_bytes + self.shared_bytes
        return len(self._tokens) > 1 and taken > self.budget_bytes

    @property
    def may_grow(self) -> bool:
        """Whether other backends have what could be a part of the budget."""
        return self.budget_bytes < self.wish_bytes

    def resize(self, budget_bytes: int, attainable_bytes: int) -> None:
        """Keep to another budget, or as close to it as what is taken lets it come.

        Args:
            budget_bytes: What all rows together may take.
            attainable_bytes: What the budget may become.
        """
        self._goal_bytes = budget_bytes
        self._attainable_bytes = attainable_bytes
        if budget_bytes >= self.budget_bytes:
            self._set_budget(budget_bytes)
        self.approach()

    def approach(self) -> None:
        """Come closer to the budget that is due, now that less is taken."""
        if self.budget_bytes > self._goal_bytes:
            taken = self.reserved_bytes + self.shared_bytes
            if taken < self.budget_bytes:
                self._set_budget(max(self._goal_bytes, taken))

    def wanted_bytes(self, waiting: Iterable[Row]) -> int:
        """Return what rows would reserve beyond what they have, if there were room.

        Args:
            waiting: Rows for which there are slots.
        """
        rows = [(self._grown(row, count), row.shared) for row, count in self._tokens.items()] + [
            (len(row.token_ids) + self._expected(row), 0) for row in waiting
        ]
        return max(self._bytes_of(rows) - self.reserved_bytes, 0)

    def require_fit(self, row: Row) -> None:
        """Refuse a row that would not fit if it were alone on the machine.

        Raises:
            OverloadedError: Holds the numbers.
        """
        prompt_tokens = len(row.request.prompt.token_ids)
        generated = 1 if row.request.is_open_ended else row.request.max_tokens
        if prompt_tokens + generated <= self._wish_tokens:
            return
        needed = self._profile.row_bytes(prompt_tokens + generated)
        raise OverloadedError(
            f"the KV cache of {prompt_tokens} prompt tokens and {generated} generated ones "
            f"takes {needed / _MIB:.1f} MiB, and there are {self.wish_bytes / _MIB:.1f} MiB: "
            f"room for {max(self._wish_tokens, 0)} tokens"
        )

    def reserve(self, row: Row, sharing: Sharing | None = None) -> bool:
        """Reserve what a row needs to run, if there is room; one that is alone takes what fits.

        Args:
            row: That would run.
            sharing: What it would use of the prompt cache; `None` changes nothing there.
        """
        tokens = len(row.token_ids) + self._expected(row)
        if self.is_alone(row) and not self._has_enough(row, tokens):
            return False
        sharing = sharing or Sharing(row.shared, self.used_tokens)
        return self._set(row, tokens, sharing)

    def extend(self, row: Row) -> bool:
        """See that a row has reserved what its next step adds; false when there is no room."""
        if row.fed < self._tokens[row]:
            return True
        sharing = Sharing(row.shared, self.used_tokens)
        tokens = row.fed + self._extension_tokens
        return self._set(row, tokens, sharing) and row.fed < self._tokens[row]

    def release(self, row: Row) -> None:
        """Give back what a row has reserved; no effect on one that has nothing."""
        self._tokens.pop(row, None)

    def is_alone(self, row: Row) -> bool:
        """Tell whether nobody else has reserved anything."""
        return self._tokens.keys() <= {row}

    def held_bytes(self, row: Row) -> tuple[int, int]:
        """Return what a row's KV cache takes at most by itself, and what it uses of the store."""
        if not row.fed:
            return 0, 0
        shared = row.shared * self._profile.bytes_per_token
        return self._profile.row_bytes(row.fed) - shared, shared

    def check(self, running: Iterable[Row]) -> None:
        """Raise AssertionError unless just these rows have reserved, within the budget."""
        if self._tokens.keys() != set(running):
            raise AssertionError("rows run without a reservation, or have one and do not run")
        if self.reserved_bytes > self.budget_bytes:
            raise AssertionError("more is reserved than there is")

    def _set_budget(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.most_tokens = self._profile.max_tokens(budget_bytes)

    def _has_enough(self, row: Row, tokens: int) -> bool:
        """Tell whether a row that is alone should run, and not wait for other backends to give.

        With less than it asks for it runs when no more is to come, and it gets somewhere.
        """
        if tokens <= self.most_tokens or not self.may_grow:
            return True
        is_final = self.budget_bytes >= self._attainable_bytes
        return is_final and len(row.token_ids) + self._extension_tokens <= self.most_tokens

    def _expected(self, row: Row) -> int:
        """Return how many more tokens a row is likely to generate."""
        left = row.request.max_tokens - row.generated
        return min(left, self._expected_tokens) if row.request.is_open_ended else left

    def _grown(self, row: Row, tokens: int) -> int:
        """Return what a row is going to ask for, if it goes on."""
        most = len(row.token_ids) + row.request.max_tokens - row.generated
        return max(tokens, min(tokens + self._extension_tokens, most))

    def _set(self, row: Row, tokens: int, sharing: Sharing) -> bool:
        others = [(count, each.shared) for each, count in self._tokens.items() if each is not row]
        if not others:
            # Whatever it shares, it is alone with it.
            tokens = min(tokens, self.most_tokens)
        else:
            taken = self._bytes_of([(tokens, sharing.tokens), *others])
            shared = sharing.used_tokens * self._profile.bytes_per_token
            if taken + shared > self.budget_bytes:
                return False
        self._tokens[row] = tokens
        self.used_tokens = sharing.used_tokens
        return True

    def _bytes_of(self, rows: Sequence[tuple[int, int]]) -> int:
        tokens, shared = zip(*rows, strict=True) if rows else ((), ())
        return self._profile.batch_bytes(tokens, shared)


def _room(tokens: int) -> int:
    """Return for how many positions a row's caches have room at most."""
    return tokens + ALLOCATION_STEP_TOKENS
