"""The prompt cache against a set of prefixes, with caches in which every wrong position shows."""

import math
from functools import lru_cache
from itertools import chain

import mlx.core as mx
import pytest
from exact_network import ExactNetwork
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backend.cache.eviction import NO_THINNING
from backend.cache.kv import Segment, evaluate
from backend.cache.layout import CacheLayout
from backend.cache.prompt_cache import MIN_HIT_TOKENS, PromptCache
from backend.cache.radix import TokenKey

pytestmark = pytest.mark.mlx

WORDS = st.sampled_from([(1,), (2, 3), (1, 2, 3, 4, 5), (7, 7, 7, 7, 7, 7, 7), (-9,)])
PROMPTS = st.lists(WORDS, min_size=1, max_size=7).map(lambda words: tuple(chain(*words)))
OWNERS = st.sampled_from(["a", "b", "c"])
CUTS = st.sets(st.integers(1, 30), max_size=3)


@lru_cache
def next_token(kinds, ids):
    """Return the likeliest token after `ids`, computed from the start."""
    network = ExactNetwork(*kinds)
    return feed(network, network.make_cache(), ids)


def feed(network, caches, ids):
    logits = network(mx.array([ids]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return logits[0, -1].argmax().item()


class PromptCacheMachine(RuleBasedStateMachine):
    """Serves prompts with a store as the engine does.

    Attributes:
        kinds: Of the network's caches.
        thins: Whether arrays for cuts in the middle alone are given up before nodes are.
        prefixes: The stored prefixes, and whether the state after each is stored.
        lacks_windows: Whether windows have been forgotten: a shorter prefix may be taken up.
    """

    kinds = ()
    thins = False

    def __init__(self):
        super().__init__()
        self.network = ExactNetwork(*self.kinds)
        self.layout = CacheLayout.of(self.network.make_cache())
        self.prefixes = {}
        self.paths = {}
        self.lacks_windows = self.thins and self.layout.has_windows
        self.evictions = 0

    @initialize(
        budget=st.one_of(st.integers(0, 2000), st.just(10**6)),
        arrays=st.one_of(st.integers(0, 40), st.just(math.inf)),
    )
    def open_store(self, budget, arrays):
        thinning = self.layout.thinning if self.thins else NO_THINNING
        self.store = PromptCache(budget, self.layout.usable, thinning=thinning, max_arrays=arrays)

    @rule(ids=PROMPTS, cuts=CUTS, owner=OWNERS)
    def serve(self, ids, cuts, owner):
        """Take up the stored prefix and compute the rest, storing it at every cut."""
        caches, fed = self.restored(ids, owner)
        for stop in sorted({cut for cut in cuts if fed < cut < len(ids)} | {len(ids)}):
            token = feed(self.network, caches, ids[fed:stop])
            assert token == next_token(self.kinds, ids[:stop])
            self.save(caches, ids[:stop], owner)
            fed = stop

    @rule(ids=PROMPTS, owner=OWNERS)
    def reply(self, ids, owner):
        """Compute token by token and store at the end: windows keep the latest only."""
        caches, fed = self.restored(ids, owner)
        for place in range(fed, len(ids)):
            token = feed(self.network, caches, ids[place : place + 1])
        assert token == next_token(self.kinds, ids)
        self.lacks_windows = self.layout.has_windows
        self.save(caches, ids, owner)

    @rule(ids=PROMPTS)
    def pin(self, ids):
        self.store.pin(TokenKey.from_ids(ids))
        self.note_evictions()

    @rule(owner=OWNERS)
    def release(self, owner):
        self.store.release(owner)
        self.paths.pop(owner, None)
        self.note_evictions()

    def restored(self, ids, owner):
        hit = self.store.lookup(TokenKey.from_ids(ids), owner)
        assert hit.matched == self.longest(ids, len(ids))
        usable = self.longest(ids, len(ids) - 1, needs_state=self.layout.has_state)
        expected = usable if usable >= MIN_HIT_TOKENS else 0
        assert hit.length <= expected
        assert hit.length == expected or self.lacks_windows
        caches = self.network.make_cache()
        if hit.length:
            self.paths[owner] = ids[: hit.length]
            self.layout.restore(caches, hit.path, hit.length, len(ids))
        return caches, hit.length

    def longest(self, ids, limit, *, needs_state=False):
        return max(
            (n for n in range(1, limit + 1) if self.is_there(ids[:n], needs_state=needs_state)),
            default=0,
        )

    def is_there(self, prefix, *, needs_state):
        return prefix in self.prefixes and (self.prefixes[prefix] or not needs_state)

    def save(self, caches, ids, owner):
        key = TokenKey.from_ids(ids)
        start = self.store.stored(key)
        segment = Segment(
            self.layout.capture(caches, start, len(ids)),
            None if self.store.has_snapshot(key) else self.layout.snapshot(caches),
        )
        evaluate([segment])
        is_stored = self.store.insert(key, start, segment, owner=owner)
        if is_stored:
            self.paths[owner] = ids
            self.prefixes |= {ids[:n]: False for n in range(start + 1, len(ids) + 1)}
            self.prefixes[ids] = self.layout.has_state
        evictions = self.store.metrics()["prompt_cache.evictions"]
        assert is_stored or evictions == self.evictions, "evicted for nothing"
        self.note_evictions()

    def note_evictions(self):
        """Leave out the evicted prefixes."""
        evictions = self.store.metrics()["prompt_cache.evictions"]
        if evictions > self.evictions or self.thins:
            self.prefixes = self.prefixes_there()
        self.evictions = evictions

    def prefixes_there(self):
        """Return those of the known prefixes that are stored, as `prefixes` does."""
        keys = {ids: TokenKey.from_ids(ids) for ids in self.prefixes}
        return {
            ids: self.store.has_snapshot(key)
            for ids, key in keys.items()
            if self.store.stored(key) == len(ids)
        }

    @invariant()
    def books_balance(self):
        if self.prefixes:
            self.store.check()
            assert self.store.metrics()["prompt_cache.tokens"] == len(self.prefixes)
            assert self.prefixes_there() == self.prefixes

    @invariant()
    def paths_of_owners_are_there(self):
        assert all(path in self.prefixes for path in self.paths.values())

    @invariant()
    def bytes_are_those_of_the_tokens_and_states(self):
        if self.lacks_windows or not self.prefixes:
            return
        arrays = {"kv": 2, "window": 2, "pair": 4, "state": 0}
        per_token = 4 * sum(arrays[kind] for kind in self.kinds)
        per_state = 4 * self.kinds.count("state")
        states = sum(self.prefixes.values())
        assert (
            self.store.metrics()["prompt_cache.bytes"]
            == per_token * len(self.prefixes) + per_state * states
        )


class CuttableMachine(PromptCacheMachine):
    kinds = ("kv", "pair")


class WindowMachine(PromptCacheMachine):
    kinds = ("window", "kv")


class StateMachine(PromptCacheMachine):
    kinds = ("state", "kv")


class ThinnedWindowMachine(WindowMachine):
    thins = True


class ThinnedStateMachine(StateMachine):
    thins = True


_SETTINGS = settings(max_examples=25, stateful_step_count=25, deadline=None)


class TestCuttable(CuttableMachine.TestCase):
    settings = _SETTINGS


class TestWindows(WindowMachine.TestCase):
    settings = _SETTINGS


class TestState(StateMachine.TestCase):
    settings = _SETTINGS


class TestThinnedWindows(ThinnedWindowMachine.TestCase):
    settings = _SETTINGS


class TestThinnedState(ThinnedStateMachine.TestCase):
    settings = _SETTINGS
