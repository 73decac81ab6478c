"""A store whose budget changes while it is used."""

import pytest
from token_blocks import anywhere, is_stored, key, put, room_for

from backend.cache.prompt_cache import PromptCache

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
    assert store.status().budget_bytes == room_for(7)
    store.check()


def test_a_store_that_is_small_enough_evicts_nothing():
    store = store_of_two()
    store.resize(room_for(8))
    assert store.status().evictions == 0
    store.check()


def test_a_store_that_grows_back_takes_more():
    store = store_of_two()
    store.resize(0)
    assert store.status().bytes == 0
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
    assert store.status().bytes == 0
    store.check()
    store.release("row")
    store.resize(room_for(10))
    assert put(store, OLD)
    store.check()


def test_what_goes_is_handed_to_the_disk():
    rescued = []
    store = store_of_two(on_evict=rescued.extend)
    store.resize(room_for(4))
    assert [node.key for node in rescued] == [key(*OLD)]
