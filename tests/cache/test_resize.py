"""A store whose budget changes while it is used."""

import mlx.core as mx
import pytest
from token_blocks import anywhere, is_stored, key, put, room_for

from backend.cache.eviction import Thinning
from backend.cache.kv import Block, Segment, evaluate
from backend.cache.prompt_cache import PromptCache
from backend.cache.radix import TokenKey

pytestmark = pytest.mark.mlx

OLD, YOUNG = (1, 2, 3, 4), (5, 6, 7, 8)


def store_of_two(**options):
    store = PromptCache(room_for(10), anywhere, **options)
    put(store, OLD)
    put(store, YOUNG)
    return store


def test_a_store_that_shrinks_evicts_the_least_recent_and_no_more_than_need_be():
    store = store_of_two()
    store.resize(room_for(7))
    assert [is_stored(store, ids) for ids in (OLD, YOUNG)] == [False, True]
    assert store.metrics()["prompt_cache.budget_bytes"] == room_for(7)
    store.check()


def test_a_store_that_is_small_enough_evicts_nothing():
    store = store_of_two()
    store.resize(room_for(8))
    assert store.metrics()["prompt_cache.evictions"] == 0
    store.check()


def test_a_store_that_grows_back_takes_more():
    store = store_of_two()
    store.resize(0)
    assert store.metrics()["prompt_cache.bytes"] == 0
    assert not put(store, OLD)
    store.resize(room_for(10))
    assert put(store, OLD)
    assert put(store, YOUNG)
    store.check()


def test_a_path_in_use_goes_last():
    store = store_of_two()
    store.lookup(key(*OLD), "row")
    store.resize(room_for(4))
    assert [is_stored(store, ids) for ids in (OLD, YOUNG)] == [True, False]
    store.resize(room_for(3))
    assert store.metrics()["prompt_cache.bytes"] == 0
    store.check()
    store.release("row")
    store.resize(room_for(10))
    assert put(store, OLD)
    store.check()


def test_what_is_used_where_it_lies_stays_whatever_the_budget():
    store = store_of_two()
    for owner in "ab":
        store.use(owner, key(*YOUNG[:2]))
    assert store.used_tokens(key()) == 2
    assert store.used_tokens(key(*YOUNG[:3])) == 3
    assert store.used_tokens(key(*OLD)) == 6
    store.resize(0)
    assert [is_stored(store, ids) for ids in (OLD, YOUNG)] == [False, True]
    store.check()
    store.release("a")
    store.resize(0)
    assert is_stored(store, YOUNG)
    store.release("b")
    store.resize(0)
    assert store.metrics()["prompt_cache.bytes"] == 0
    store.check()


def test_a_look_ahead_leaves_no_trace():
    store = store_of_two()
    path = store.preview(key(*OLD, 9))
    assert sum(piece.tokens for piece in path) == len(OLD)
    assert store.preview(key(*OLD[:1], 9)) == ()
    assert put(store, (20, 21, 22))
    assert [is_stored(store, ids) for ids in (OLD, YOUNG)] == [False, True]


def test_what_goes_is_handed_to_the_disk():
    rescued = []
    store = store_of_two(on_evict=rescued.extend)
    store.resize(room_for(4))
    assert [node.key for node in rescued] == [key(*OLD)]


def without_windows(segment):
    return Segment(
        tuple(Block(b.tokens, (b.layers[0], ()), has_windows=False) for b in segment.blocks)
    )


def test_windows_that_are_given_up_free_their_memory_at_once():
    thinning = Thinning(without_windows, reach_tokens=16, has_snapshots=False)
    store = PromptCache(2**30, anywhere, thinning=thinning)
    ids = tuple(range(512))
    for start, stop in ((0, 256), (256, 512)):
        arrays = tuple((mx.ones((1, 1, stop - start, width)),) for width in (1, 4096))
        segment = Segment((Block(stop - start, arrays),))
        evaluate([segment])
        store.insert(TokenKey.from_ids(ids[:stop]), start, segment)
    del arrays, segment
    before = mx.get_active_memory()
    stored = store.metrics()["prompt_cache.bytes"]
    store.resize(stored - 3 * 2**20)
    assert stored - store.metrics()["prompt_cache.bytes"] >= 3 * 2**20
    assert before - mx.get_active_memory() >= 3 * 2**20
