"""Fits the KV caches of requests into the memory after the weights.

Rows that decode together are charged their own lengths. In families that mlx-lm pads
to the longest row, each row is charged the longest. The part of the prompt cache that rows use
in place is charged once.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from backend.cache.kv import ALLOCATION_STEP_TOKENS
from backend.config import (
    CPU_MEMORY_SHARE,
    CUDA_MEMORY_SHARE,
    MIN_KV_SHARE,
    RESERVE_SHARE,
    ModelOptions,
)
from backend.engine.rows.pacing import LEAST_TOKENS, PassMemory
from backend.engine.rows.row import Row
from backend.errors import OutOfMemoryError, OverloadedError
from common.machine_memory import machine_bytes

# The growth of a request's expected length each time that it exceeds it.
EXTENSION_SHARE = 0.25

# A row shares a buffer with slightly longer rows, and with room for the next positions.
PADDING_SHARE = 1 / 16

# A token of a prompt, and one of its reply.
_FEWEST_TOKENS = 2

_ENDLESS = 2**40
_MIB = 2**20


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WindowProfile:
    """Layers that keep the latest `size` positions."""

    bytes_per_token: int
    size: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """The part of the prompt cache that a row would use in place.

    Attributes:
        used_tokens: Tokens of the prompt cache that would then be in use by any row, counted once.
    """

    tokens: int = 0
    used_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvProfile:
    """The size of one sequence's caches, over all layers.

    Attributes:
        bytes_per_token: Of layers that keep every position.
        fixed_bytes: Of recurrent states.
        windows: Layers that keep some positions.
        has_own_lengths: Whether rows that decode together keep their own lengths.
        draft: The additional caches of a draft model, which share nothing.
    """

    bytes_per_token: int = 0
    fixed_bytes: int = 0
    windows: tuple[WindowProfile, ...] = ()
    has_own_lengths: bool = False
    draft: "KvProfile | None" = None

    def batch_bytes(self, tokens: Sequence[int], shared: Sequence[int] = ()) -> int:
        """Return the maximum size of the caches of rows that decode together.

        Args:
            shared: Tokens of each in the prompt cache, which are not counted; none if
                omitted.
        """
        drafting = self.draft.batch_bytes(tokens) if self.draft else 0
        return drafting + self._own_batch_bytes(tokens, shared)

    def row_bytes(self, tokens: int) -> int:
        """Return the maximum size of caches of a length: they are allocated in steps."""
        return self._own_row_bytes(tokens) + (self.draft.row_bytes(tokens) if self.draft else 0)

    def max_tokens(self, budget_bytes: int) -> int:
        """Return the maximum tokens of one sequence; below 0 if not even an empty one fits."""
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
    """The reserved tokens of each running row; belongs to the main thread.

    A row with a limit reserves all of it. A row that may continue up to the context
    reserves its likely need, and asks for more when it decodes beyond.

    Attributes:
        wish_bytes: The budget unless other backends need memory.
        most_tokens: The maximum tokens of a single row.
        used_tokens: Tokens of the prompt cache that rows use in place, each counted once.
        tokens: Reserved by each running row.
        passes: The memory that the passes of prompts take while they run.
        pass_bytes: Kept free for one pass beside the budget, which pays for larger ones.
    """

    def __init__(
        self,
        profile: KvProfile,
        budget_bytes: int,
        expected_tokens: int,
        pass_bytes: float = math.inf,
    ) -> None:
        """Start empty; `expected_tokens` is the likely reply length of a row without a limit."""
        self.passes, self.pass_bytes = PassMemory(), pass_bytes
        self.wish_bytes = budget_bytes
        self.used_tokens = 0
        self._profile = profile
        self._goal_bytes = self._attainable_bytes = budget_bytes
        self._set_budget(budget_bytes)
        self._wish_tokens = self.most_tokens
        self._expected_tokens = expected_tokens
        self._extension_tokens = math.ceil(EXTENSION_SHARE * expected_tokens)
        self.tokens: dict[Row, int] = {}

    @property
    def reserved_bytes(self) -> int:
        """The bytes reserved by running rows, without shared ones."""
        return self._kv_bytes + self._pass_bytes_of(self.tokens)

    @property
    def _kv_bytes(self) -> int:
        return self._bytes_of([(count, row.shared) for row, count in self.tokens.items()])

    @property
    def shared_bytes(self) -> int:
        """The bytes of the prompt cache that rows use in place."""
        return self.used_tokens * self._profile.bytes_per_token

    @property
    def left_bytes(self) -> int:
        """The unreserved part of the budget; shared bytes are part of it."""
        return max(self.budget_bytes - self.reserved_bytes, 0)

    @property
    def is_exceeded(self) -> bool:
        """Whether several rows exceed the budget, because a prefix was lost or has grown."""
        taken = self.reserved_bytes + self.shared_bytes
        return len(self.tokens) > 1 and taken > self.budget_bytes

    @property
    def may_grow(self) -> bool:
        """Whether other backends hold memory that may join the budget."""
        return self.budget_bytes < self.wish_bytes

    def set_own_lengths(self, has_own_lengths: bool) -> None:  # noqa: FBT001 (the only argument)
        """Set whether rows that decode together keep their own lengths; at most one runs."""
        self._profile = replace(self._profile, has_own_lengths=has_own_lengths)

    def resize(self, budget_bytes: int, attainable_bytes: int) -> None:
        """Apply another budget, or come as close to it as the used memory allows."""
        self._goal_bytes = budget_bytes
        self._attainable_bytes = attainable_bytes
        if budget_bytes >= self.budget_bytes:
            self._set_budget(budget_bytes)
        self.approach()

    def approach(self) -> None:
        """Come closer to the due budget, now that less is used."""
        if self.budget_bytes > self._goal_bytes:
            taken = self.reserved_bytes + self.shared_bytes
            if taken < self.budget_bytes:
                self._set_budget(max(self._goal_bytes, taken))

    def wanted_bytes(self, waiting: Iterable[Row]) -> int:
        """Return the bytes that rows would reserve additionally, if there were room."""
        rows = [(self._grown(row, count), row.shared) for row, count in self.tokens.items()] + [
            (len(row.token_ids) + self._expected(row), 0) for row in waiting
        ]
        return max(self._bytes_of(rows) - self.reserved_bytes, 0)

    def require_room(self, options: ModelOptions) -> None:
        """Refuse options by which every request would be refused.

        Raises:
            OutOfMemoryError: It names the option, with the numbers.
        """
        if self._wish_tokens >= _FEWEST_TOKENS:
            return
        is_limited = options.tuning.memory.max_kv_bytes is not None
        field = "max_kv_bytes" if is_limited else "GPUMemoryUtilization"
        raise OutOfMemoryError(
            f"is too small: {self.wish_bytes:,} bytes are for KV caches, and that of the "
            f"shortest request takes {self._profile.row_bytes(_FEWEST_TOKENS):,}",
            field=field,
        )

    def require_fit(self, row: Row) -> None:
        """Refuse a row that would not fit if it were alone on the machine.

        Raises:
            OverloadedError: The message has the numbers.
        """
        prompt_tokens = len(row.request.prompt.token_ids)
        generated = 1 if row.request.is_open_ended else row.max_tokens
        needed = self._profile.row_bytes(prompt_tokens + generated)
        if prompt_tokens + generated <= self._wish_tokens:
            self._require_pass(prompt_tokens, self.wish_bytes - needed)
            return
        raise OverloadedError(
            f"the KV cache of {prompt_tokens} prompt tokens and {generated} generated ones "
            f"takes {needed / _MIB:.1f} MiB, and there are {self.wish_bytes / _MIB:.1f} MiB: "
            f"room for {max(self._wish_tokens, 0)} tokens"
        )

    def _require_pass(self, stop: int, left_bytes: int) -> None:
        """Refuse a prompt if its last pass would not fit, not even a small one."""
        taken = self.passes.least(stop)
        if taken <= self.pass_bytes + left_bytes:
            return
        raise OverloadedError(
            f"a pass over the last {LEAST_TOKENS} of {stop} prompt tokens takes at least "
            f"{taken / _MIB:.1f} MiB besides their KV cache, and "
            f"{(self.pass_bytes + left_bytes) / _MIB:.1f} MiB are left for it"
        )

    def fitting_tokens(self, start: int, tokens: int, free_bytes: int) -> int:
        """Return how many of so many tokens may be prefilled in one pass, at least a few.

        Args:
            start: The position of the first one.
            free_bytes: The part of the budget that neither rows nor the prompt cache hold.
        """
        room = self.pass_bytes + self._pass_bytes_of(self.tokens) + free_bytes
        return self.passes.fitting(start, tokens, room)

    def reserve(self, row: Row, sharing: Sharing | None = None) -> bool:
        """Reserve a row's memory if there is room; a single row takes whatever fits.

        Args:
            sharing: Its use of the prompt cache; `None` leaves that unchanged.
        """
        tokens = len(row.token_ids) + self._expected(row)
        if self.is_alone(row) and not self._has_enough(row, tokens):
            return False
        sharing = sharing or Sharing(row.shared, self.used_tokens)
        return self._set(row, tokens, sharing)

    def extend(self, row: Row) -> bool:
        """Reserve the memory of a row's next step; false without room."""
        if row.fed < self.tokens[row]:
            return True
        sharing = Sharing(row.shared, self.used_tokens)
        tokens = row.fed + self._extension_tokens
        return self._set(row, tokens, sharing) and row.fed < self.tokens[row]

    def release(self, row: Row) -> None:
        """Release a row's reservation, if any."""
        self.tokens.pop(row, None)

    def is_alone(self, row: Row) -> bool:
        """Tell whether no other row has a reservation."""
        return self.tokens.keys() <= {row}

    def held_bytes(self, row: Row) -> tuple[int, int]:
        """Return the maximum size of a row's own KV cache, and of its part of the store."""
        if not row.fed:
            return 0, 0
        shared = row.shared * self._profile.bytes_per_token
        return self._profile.row_bytes(row.fed) - shared, shared

    def check(self, running: Iterable[Row]) -> None:
        """Raise AssertionError unless exactly these rows have reservations, within the budget."""
        if self.tokens.keys() != set(running):
            raise AssertionError("rows run without a reservation, or have one and do not run")
        if self._kv_bytes > self.budget_bytes:
            raise AssertionError("more is reserved than the budget")

    def _set_budget(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.most_tokens = self._profile.max_tokens(budget_bytes)

    def _has_enough(self, row: Row, tokens: int) -> bool:
        """Tell whether a single row should run instead of waiting for other backends.

        With less than its request it runs if no more will come, and it makes progress.
        """
        if tokens <= self.most_tokens or not self.may_grow:
            return True
        is_final = self.budget_bytes >= self._attainable_bytes
        return is_final and len(row.token_ids) + self._extension_tokens <= self.most_tokens

    def _expected(self, row: Row) -> int:
        """Return the number of tokens that a row is likely to add."""
        left = row.max_tokens - row.generated
        return min(left, self._expected_tokens) if row.request.is_open_ended else left

    def _grown(self, row: Row, tokens: int) -> int:
        """Return the next reservation of a row, if it continues."""
        most = len(row.token_ids) + row.max_tokens - row.generated
        return max(tokens, min(tokens + self._extension_tokens, most))

    def _set(self, row: Row, tokens: int, sharing: Sharing) -> bool:
        others = [(count, each.shared) for each, count in self.tokens.items() if each is not row]
        if not others:
            # Nothing else uses its shared part.
            tokens = min(tokens, self.most_tokens)
        else:
            taken = self._bytes_of([(tokens, sharing.tokens), *others])
            taken += self._pass_bytes_of([row, *self.tokens])
            shared = sharing.used_tokens * self._profile.bytes_per_token
            if taken + shared > self.budget_bytes:
                return False
        self.tokens[row] = tokens
        self.used_tokens = sharing.used_tokens
        return True

    def _pass_bytes_of(self, rows: Iterable[Row]) -> int:
        """Return the budget's bytes for a small pass at the end of the longest prompt."""
        stop = max((len(row.token_ids) for row in rows if row.prefill_left), default=0)
        beyond = self.passes.least(stop) - self.pass_bytes if stop else 0
        return int(max(beyond, 0))

    def _bytes_of(self, rows: Sequence[tuple[int, int]]) -> int:
        tokens, shared = zip(*rows, strict=True) if rows else ((), ())
        return self._profile.batch_bytes(tokens, shared)


def _room(tokens: int) -> int:
    """Return the maximum allocated positions of a row's caches."""
    return tokens + ALLOCATION_STEP_TOKENS


def pass_bytes(
    options: ModelOptions, weights_bytes: int, working_set_bytes: int, budget_bytes: int
) -> int:
    """Return the memory that is kept free for one pass, at least as much as for KV caches.

    Args:
        weights_bytes: With the maximum size of remembered media.
    """
    usable = usable_bytes(options, working_set_bytes)
    return max(usable - weights_bytes - budget_bytes, least_kv_bytes(usable))


def kv_budget_bytes(
    options: ModelOptions, weights_bytes: int, working_set_bytes: int, *, media_bytes: int = 0
) -> int:
    """Return the memory for the KV caches of running requests and the prompt cache together.

    Args:
        working_set_bytes: The memory that the device can hold without harm.
        media_bytes: The maximum size of remembered media.
    """
    if options.tuning.memory.max_kv_bytes is not None:
        return options.tuning.memory.max_kv_bytes
    usable = usable_bytes(options, working_set_bytes)
    budget = int((usable - weights_bytes - media_bytes) * (1.0 - RESERVE_SHARE))
    least = least_kv_bytes(usable)
    if budget < least:
        log.warning(
            "the weights take %.1f of %.1f GiB: %.2f GiB are taken for KV caches all the same",
            weights_bytes / 2**30,
            usable / 2**30,
            least / 2**30,
        )
    return max(budget, least)


def usable_bytes(options: ModelOptions, working_set_bytes: int) -> int:
    """Return the host's memory limit for this backend, and with a ledger for all of them."""
    return int(working_set_bytes * options.memory_utilization)


def least_kv_bytes(usable_bytes: int) -> int:
    """Return the smallest useful budget."""
    return int(MIN_KV_SHARE * usable_bytes)


def device_name() -> str:
    """Return an id of the default device: backends on one device share its memory."""
    info = mx.device_info()
    return str(info.get("uuid") or info.get("device_name") or "")


def working_set_bytes() -> int:
    """Return the memory that the default device can hold without harm to any process."""
    info = mx.device_info()
    if recommended := info.get("max_recommended_working_set_size"):
        return int(recommended)
    if total := info.get("total_memory"):
        return int(int(total) * CUDA_MEMORY_SHARE)
    return int(machine_bytes() * CPU_MEMORY_SHARE)
