"""One request inside the engine: its tokens, its KV cache, its hidden states, its progress."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

import mlx.core as mx

from backend.cache.layers import cache_bytes
from backend.cache.prompt_cache import PrefixHit
from backend.cache.radix import TokenKey
from backend.core.engine_status import RequestPhase, RequestStatus
from backend.core.guide import ReplyMatcher
from backend.core.prefix_listing import HitKind
from backend.core.prompt import MediaSpan, Place
from backend.core.request import GenerationParams, GenerationRequest, Remembered
from backend.core.step import FinishReason, PrefillDone
from backend.engine.plan import Caches, FreshCaches

# A head does without those of older tokens.
MOST_TOKENS = 512
# Passes of fewer tokens are kept as a whole.
_WIDE = 32


class _Part(NamedTuple):
    """States [B, T, D] of a pass, of some layers: the first `tokens` of one row are its own."""

    layers: Sequence[mx.array]
    place: int
    tokens: int

    def own(self, first: int = 0) -> mx.array:
        """Return those of its tokens from one on [T, D], of all layers side by side."""
        layers = [states[self.place, first : self.tokens] for states in self.layers]
        return mx.concatenate(layers, axis=-1) if len(layers) > 1 else layers[0]

    def apart(self) -> "_Part":
        """Return the last of them without those of other rows; computed on return."""
        kept = min(self.tokens, MOST_TOKENS)
        own = self.own(self.tokens - kept)[None]
        mx.eval(own)
        return _Part([own], 0, kept)


class RowStates:
    """Those of consecutive tokens of one row; belongs to the main thread.

    Attributes:
        stop: The place of the token after the last of them.
    """

    def __init__(self) -> None:
        self.stop = 0
        self._parts: deque[_Part] = deque()
        self._count = 0

    @property
    def first(self) -> int:
        """The place of the first token whose state is there."""
        return self.stop - self._count

    def add(self, layers: Sequence[mx.array], place: int, count: int, stop: int) -> None:
        """Take the first `count` of the row at `place` in a pass of the model.

        Args:
            layers: Of each layer that is read, states [B, T, D] of all rows.
            stop: The place of the token after the last of those.
        """
        part = _Part(layers, place, count)
        if layers[0].shape[1] > _WIDE:
            part = part.apart()
        if stop - part.tokens != self.stop:
            self._parts.clear()
            self._count = 0
        self._parts.append(part)
        self._count += part.tokens
        self.stop = stop
        self._forget(self.stop - MOST_TOKENS)

    def taken(self, first: int, stop: int) -> mx.array:
        """Return those [T, D] of some of the tokens, all of which are there; forget others."""
        known = mx.concatenate([part.own() for part in self._parts])
        found = known[first - self.first : stop - self.first]
        # The last one is wanted again, if its token turns out to be the latest still.
        self._forget(stop - 1)
        return found

    def _forget(self, first: int) -> None:
        """Let go of passes that hold none from the place `first` on."""
        while self._parts and self.first + self._parts[0].tokens <= first:
            self._count -= self._parts.popleft().tokens


def padded_states(states: Sequence[mx.array], width: int) -> mx.array:
    """Return states [B, T, D] of rows of unlike length [T, D], followed by zeros."""
    return mx.stack([mx.pad(row, ((0, width - row.shape[0]), (0, 0))) for row in states])


MIN_BOUNDARY_DISTANCE = 8


@dataclass(eq=False, slots=True)
class Row:
    """One request from submission to finish; belongs to the main thread.

    Attributes:
        max_tokens: The most tokens of its reply; less than the request's once it is curtailed.
        token_ids: Prompt, then every generated token that has been read.
        cache: The caches of all layers while the row is alone; `None` before prefill and
            while the row is part of a batch.
        fed: The number of tokens in the KV cache.
        drawn: Generated tokens, including the one in flight.
        inherited: Generated tokens drawn earlier, in another process.
        losses: Processes lost over it since: its passes are smaller.
        has_left: Finished or cancelled; its tokens in flight are dropped.
        is_paused: Leaving the batch, to wait until there is memory for it again.
        may_share_passes: Whether its prompt may be fed in one pass with others.
        may_reuse: Whether its prefix may come from the prompt cache.
        seen_version: The prompt cache's version when the prompt was looked up.
        shared: The first positions, used in place in the prompt cache.
        parted_at: Where the prompt left a stored one that continues differently; 0 is nowhere.
        branch: Where the prompt left the stored one, if that is well after the restored part.
        states: The hidden states of its latest tokens, if a head reads them.
    """

    request: GenerationRequest
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    params: GenerationParams = field(init=False)
    request_id: str = field(init=False)
    max_tokens: int = field(init=False)
    prompt_tokens: int = field(init=False)
    token_ids: list[int] = field(init=False)
    cache: Caches | None = None
    fed: int = 0
    drawn: int = 0
    inherited: int = 0
    losses: int = 0
    has_left: bool = False
    is_paused: bool = False
    may_share_passes: bool = True
    may_reuse: bool = True
    seen_version: int = -1
    cached_tokens: int = 0
    shared: int = 0
    hit_kind: HitKind = HitKind.MISS
    parted_at: int = 0
    branch: int = 0
    saved: int = 0
    is_system_pinned: bool = False
    drafted: int = 0
    accepted: int = 0
    states: RowStates | None = None
    _places: tuple[int, ...] = field(default=(), init=False, repr=False)
    _matcher: ReplyMatcher | None = field(default=None, init=False, repr=False)
    _prompt_key: TokenKey | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.params = self.request.params
        self.request_id = self.params.request_id
        self.max_tokens = self.request.max_tokens
        self.token_ids = list(self.request.prompt.token_ids)
        self.prompt_tokens = len(self.token_ids)
        self._places = tuple(_apart(self.request.prompt.boundaries))

    @classmethod
    def resumed(
        cls, request: GenerationRequest, generated: Sequence[int], losses: int = 0
    ) -> "Row":
        """Return a row that continues after earlier tokens of its reply."""
        row = cls(request, inherited=len(generated), losses=losses, may_share_passes=not losses)
        if generated:
            row.token_ids += generated
            row.suspend()
        return row

    @property
    def matcher(self) -> ReplyMatcher | None:
        """The matcher of the row's grammar, if any; it has consumed the generated tokens."""
        if self._matcher is None and self.request.grammar is not None:
            self._matcher = self.request.grammar.matcher()
            for token_id in self.token_ids[len(self.request.prompt.token_ids) :]:
                self._matcher.consume(token_id)
        return self._matcher

    @property
    def prompt_key(self) -> TokenKey:
        """The prompt as a key of the prompt cache; packed on first use."""
        if self._prompt_key is None:
            self._prompt_key = TokenKey.from_ids(self.request.prompt.key_ids)
        return self._prompt_key

    def key(self) -> TokenKey:
        """Return the tokens in the KV cache as a key of the prompt cache."""
        prompt = self.request.prompt
        if not prompt.media and not prompt.scope:
            return TokenKey.from_ids(self.token_ids[: self.fed])
        generated = TokenKey.from_ids(prompt.scoped_ids(self.token_ids[len(self.prompt_key) :]))
        return TokenKey.concat([self.prompt_key, generated])[: self.fed]

    def media_at(self, position: int) -> MediaSpan | None:
        """Return the medium of a token."""
        spans = self.request.prompt.media
        return next((span for span in spans if span.start <= position < span.stop), None)

    @property
    def next_media_start(self) -> int:
        """The first unfed token of a medium; otherwise one after the last."""
        starts = (span.start for span in self.request.prompt.media if span.start >= self.fed)
        return next(starts, len(self.token_ids))

    def splits_medium(self, position: int) -> bool:
        """Tell whether a prompt that ends there would contain a part of a medium."""
        span = self.media_at(position)
        return span is not None and span.start < position

    @property
    def place(self) -> Place:
        """The part of a conversation that ends with the fed tokens."""
        if self.generated:
            return Place.REPLY
        if self.prefill_left == 0:
            return Place.PROMPT
        if self.fed == self.request.prompt.system_tokens:
            return Place.SYSTEM
        return Place.MESSAGE if self.fed in self.boundaries else Place.INNER

    @property
    def is_remembered(self) -> bool:
        """Whether the fed tokens may be stored."""
        match self.params.remembered:
            case Remembered.ALL:
                return True
            case Remembered.PROMPT:
                return self.fed <= len(self.request.prompt.token_ids)
            case Remembered.NOTHING:
                return False
            case _:
                assert_never(self.params.remembered)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where other prompts branched off from this one, or are expected to."""
        return (*self._places, self.branch)

    @property
    def prefill_left(self) -> int:
        """Tokens to feed before decoding; the first decode step feeds the last one."""
        return len(self.token_ids) - 1 - self.fed

    @property
    def unfed(self) -> int:
        """Tokens that are not in the KV cache; while decoding usually only the latest."""
        return len(self.token_ids) - self.fed

    @property
    def generated(self) -> int:
        """The number of generated tokens that have been read."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def wants_more(self) -> bool:
        """Whether another token may be drawn."""
        has_ended = self.has_left or self.is_paused
        return not has_ended and self.drawn < self.max_tokens

    def admit(self) -> None:
        """Begin the prefill: the row has a slot and memory."""
        self.admitted_at = time.monotonic()

    def prefill_done(self, now: float) -> PrefillDone:
        """Return the event that ends the prefill."""
        return PrefillDone(
            cached_tokens=self.cached_tokens,
            prefill_ms=(now - self.admitted_at) * 1000.0,
            hit_kind=self.hit_kind,
            parted_at=self.parted_at,
            ended_at=now,
        )

    def own_caches(self, fresh_caches: FreshCaches) -> Caches:
        """Return its caches; the first time, new ones."""
        if self.cache is None:
            self.cache = fresh_caches()
        return self.cache

    def hold(self, caches: Caches) -> None:
        """Have these caches, which a batch had before."""
        self.cache = caches

    def release(self) -> Caches | None:
        """Return its caches, and have them no more."""
        cache, self.cache = self.cache, None
        return cache

    def count_fed(self, count: int) -> None:
        """Count tokens that have entered its caches."""
        self.fed += count

    def note_states(self, layers: Sequence[mx.array], place: int, count: int) -> None:
        """Keep the hidden states of the latest fed tokens, for a head; see `RowStates.add`."""
        self.states = self.states or RowStates()
        self.states.add(layers, place, count, self.fed)

    def note_lookup(self, hit: PrefixHit, version: int) -> None:
        """Record a lookup of its prompt in a version of the prompt cache."""
        self.seen_version = version
        if len(hit.beyond) and hit.matched < len(self.prompt_key) - 1:
            self.parted_at = max(self.parted_at, hit.matched)
        if hit.matched - hit.length >= MIN_BOUNDARY_DISTANCE:
            self.branch = hit.matched

    def stop_reuse(self) -> None:
        """Compute all that is not restored yet."""
        self.may_reuse = False

    def share(self, tokens: int) -> None:
        """Use the first positions in place in the prompt cache."""
        self.shared = tokens

    def note_saved(self) -> None:
        """Record that all fed tokens were offered to the prompt cache."""
        self.saved = self.fed

    def note_pinned(self) -> None:
        """Record that its system prompt is marked there."""
        self.is_system_pinned = True

    def pause(self) -> None:
        """Leave the batch, to wait for memory."""
        self.is_paused = True

    def advance(self) -> None:
        """Count a token that is being drawn, after the latest one has been fed."""
        self.fed += 1
        self.drawn += 1

    def finish(self) -> None:
        """End: tokens in flight are dropped."""
        self.has_left = True

    def take(self, token_id: int) -> FinishReason | None:
        """Append a generated token and return its finish reason if it is the last."""
        request = self.request
        if request.grammar is not None and self.matcher is not None:
            self.matcher.consume(token_id)
        self.token_ids.append(token_id)
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
        if token_id in request.stop_token_ids:
            return FinishReason.STOP
        is_last = len(self.token_ids) - self.prompt_tokens >= self.max_tokens
        return FinishReason.LENGTH if is_last else None

    def confirm(self, draft: Sequence[int], drawn: Sequence[int]) -> Sequence[int]:
        """Count a draft, and return the row's own tokens, which it has not taken yet.

        Args:
            draft: Tokens fed after the latest one.
            drawn: The tokens drawn after the latest one and each of them.
        """
        stops = self.request.stop_token_ids
        right = 0
        while right < len(draft) and drawn[right] == draft[right] and drawn[right] not in stops:
            right += 1
        self.drafted += len(draft)
        self.accepted += right
        self.drawn += 1 + right
        return drawn[: 1 + right]

    def take_over(self, caches: Caches, tokens: int, kind: HitKind) -> None:
        """Continue from caches of the prompt's first tokens, more than computed so far."""
        self.cached_tokens += tokens - self.fed
        self.cache, self.fed, self.saved, self.hit_kind = caches, tokens, tokens, kind

    def rewind(self) -> None:
        """Drop the KV cache, so that all tokens so far are prefilled again from scratch."""
        self.cache = self._matcher = None
        self.fed = self.saved = self.cached_tokens = self.shared = 0
        self.hit_kind = HitKind.MISS
        self.may_reuse = self.is_paused = False
        self.drawn = self.generated

    def isolate(self) -> None:
        """Start again, in passes of its own."""
        self.rewind()
        self.may_share_passes = False

    def suspend(self) -> None:
        """Drop the KV cache, to be restored from the prompt cache as far as stored.

        Call it when no token is in flight.
        """
        self.fed = len(self.token_ids)
        may_reuse, whole = self.may_reuse, self.key()
        self.rewind()
        self.may_reuse, self.seen_version, self._prompt_key = may_reuse, -1, whole

    def curtail(self) -> None:
        """End after the token in flight, or after one more if there is none."""
        self.max_tokens = max(self.drawn, self.generated + 1)

    def status(
        self, phase: RequestPhase, kv_bytes: int = 0, kv_shared_bytes: int = 0
    ) -> RequestStatus:
        """Return a snapshot, with the row's memory from the reservations."""
        prompt_tokens = len(self.request.prompt.token_ids)
        decoding_s = time.monotonic() - self.first_token_at
        return RequestStatus(
            request_id=self.request_id,
            phase=phase,
            prompt_tokens=prompt_tokens,
            prefilled_tokens=min(self.fed, prompt_tokens),
            cached_tokens=min(self.cached_tokens, prompt_tokens),
            hit_kind=self.hit_kind,
            generated_tokens=self.generated,
            first_token_ms=max(self.first_token_at - self.submitted_at, 0.0) * 1000.0,
            tokens_per_s=max(self.generated - self.inherited - 1, 0) / decoding_s,
            kv_bytes=kv_bytes,
            kv_shared_bytes=kv_shared_bytes,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )

    def twin(self) -> "Row":
        """Return an independent row of the same tokens."""
        twin = Row(self.request)
        twin.token_ids = list(self.token_ids)
        twin.rewind()
        return twin

    def cache_bytes(self) -> int:
        """Return the size of the row's own KV caches."""
        return sum(map(cache_bytes, self.cache or ()))


def _apart(places: Sequence[int]) -> Iterator[int]:
    """Yield places that are some tokens apart: computing a few is cheaper than storing."""
    latest = 0
    for place in places:
        if place - latest >= MIN_BOUNDARY_DISTANCE:
            latest = place
            yield place
