"""The contents of the prompt cache, as plain values."""

from dataclasses import dataclass

from backend.core.compute import ComputeRequest
from backend.core.prompt import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """A node of the prompt cache: the tokens that follow those of its parent.

    Attributes:
        number: From 1 on; parents come before their children.
        parent: The number of the node that it goes on from; 0 for none.
        start: Tokens before it.
        hits: Requests that took all of it up, and have ended.
        idle_requests: Requests since one used it.
        worth: Tokens that it is expected to save, per MiB; of an inner node, the best below.
        is_pinned: Whether it goes last, with a system prompt that ends here or below.
        is_in_use: Whether a running request builds on it.
        is_on_disk: Whether it was written to disk as well.
        has_state: Whether the state of recurrent layers at its end is stored.
        head: Keys of its first tokens, as far as they were asked for.
        words: Their text, as far as it may be read; the engine knows none.
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
    """A part of prompts that was evicted and then wanted again.

    Attributes:
        times: How often.
        recomputed_tokens: In all.
        head: As in `StoredPrefix`, and so are the words.
    """

    start: int
    tokens: int
    times: int
    recomputed_tokens: int
    head: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseSpan:
    """The lookups of some minutes.

    Attributes:
        age_s: Seconds since its beginning.
    """

    age_s: float
    requests: int
    looked_up_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCacheListing:
    """The prompt cache at one moment.

    Attributes:
        prefixes: Those of most worth, with all that they go on from.
        spans: The last hours, the oldest first; without those in which nobody asked.
        recomputed: The most expensive ones, of those that are remembered.
        recomputed_tokens: Tokens of prompts that had been evicted, in all.
        stateless_tokens: Tokens of prompts that were stored, but could not be taken up because a
            state or a sliding window was missing there.
    """

    prefixes: tuple[StoredPrefix, ...] = ()
    spans: tuple[ReuseSpan, ...] = ()
    recomputed: tuple[RecomputedPrefix, ...] = ()
    recomputed_tokens: int = 0
    stateless_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingCall:
    """A look at the prompt cache.

    Attributes:
        wants_words: Whether the first words of prefixes are told.
        scope: Those of this scope are told as well as those of none; empty for no scope.
    """

    max_prefixes: int
    wants_words: bool = False
    scope: str = ""


class ListingRequest(
    ComputeRequest[PromptCacheListing], frozen=True, kw_only=True, tag=True, array_like=True
):
    """A request for the contents of the prompt cache.

    Attributes:
        max_prefixes: How many are listed.
        head_tokens: How many first tokens of each are told.
    """

    max_prefixes: int
    head_tokens: int = 0
