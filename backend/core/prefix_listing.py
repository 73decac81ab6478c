"""The contents of the prompt cache, as plain values."""

from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from backend.core.prompt import Place
from backend.core.request import ComputeRequest


class HitKind(Enum):
    """How a prompt relates to the stored one that it hit."""

    MISS = "miss"
    EXACT = "exact"
    SHORTER = "shorter"
    LONGER = "longer"
    DIVERGING = "diverging"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """A node of the prompt cache: the tokens that follow its parent's.

    Attributes:
        number: Counted from 1; parents come before their children.
        parent: Number of the node that it continues; 0 for none.
        start: Number of tokens before it.
        hits: Finished requests that reused all of it.
        idle_requests: Requests since it was last used.
        worth: Tokens that it is expected to save, per MiB; for an inner node, the best below it.
        is_pinned: Whether it is evicted last, because a system prompt ends here or below.
        is_in_use: Whether a running request builds on it.
        has_state: Whether the recurrent layers' state at its end is stored.
        head: Keys of its first tokens, as many as were requested.
        words: Their text, as far as it may be read; always empty in the engine.
    """

    number: int
    parent: int
    start: int
    tokens: int
    bytes: int
    place: Place
    hits: int
    idle_requests: int
    worth: float
    is_pinned: bool
    is_in_use: bool
    is_on_disk: bool
    has_state: bool
    head: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedPrefix:
    """A part of prompts that was evicted and then needed again.

    Attributes:
        head: As in `StoredPrefix`; likewise the words.
    """

    start: int
    tokens: int
    times: int
    recomputed_tokens: int
    head: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True)
class ReuseSpan:
    """Lookups within a few minutes."""

    age_s: float = 0.0
    requests: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0


class PromptCacheListing(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """The prompt cache at one moment.

    Attributes:
        prefixes: The most valuable ones, with all their ancestors.
        spans: The last hours, oldest first; spans without lookups are left out.
        recomputed: The most expensive of those that are remembered.
        stateless_tokens: Prompt tokens that were stored but not reusable, because a state or a
            sliding window was missing.
    """

    prefixes: tuple[StoredPrefix, ...] = ()
    spans: tuple[ReuseSpan, ...] = ()
    recomputed: tuple[RecomputedPrefix, ...] = ()
    recomputed_tokens: int = 0
    stateless_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingCall:
    """A request to list the prompt cache.

    Attributes:
        wants_words: Whether to include the first words of prefixes.
        scope: A scope whose prefixes are listed along with the public ones; empty for none.
    """

    max_prefixes: int
    wants_words: bool = False
    scope: str = ""


class ListingRequest(
    ComputeRequest[PromptCacheListing], frozen=True, kw_only=True, tag=True, array_like=True
):
    """A request for the contents of the prompt cache.

    Attributes:
        head_tokens: Number of first tokens to include of each.
    """

    max_prefixes: int
    head_tokens: int = 0
