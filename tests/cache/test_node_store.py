"""Evictions when there is no room: which nodes and snapshots go first, and which stay."""

import gc
import weakref

import pytest
from token_blocks import (
    ARRAYS_PER_BLOCK,
    anywhere,
    at_snapshots,
    is_stored,
    key,
    look,
    put,
    room_for,
)

from backend.cache.eviction import NO_THINNING, Thinning
from backend.cache.kv import Segment
from backend.cache.prompt_cache import PromptCache
from backend.core.prefix_listing import HitKind

pytestmark = pytest.mark.mlx

TEN = tuple(range(1, 11))


def test_the_least_recent_leaf_goes_first_and_no_more_than_need_be():
    store = PromptCache(room_for(14), anywhere)
    trunk = (1, 2, 3, 4, 5)
    old, used, young = ((*trunk, n, n + 1, n + 2) for n in (10, 20, 30))
    for ids in (old, used, young):
        put(store, ids)
    look(store, old)
    put(store, (*trunk, 40, 41))
    assert [is_stored(store, ids) for ids in (old, used, young)] == [True, False, True]
    assert store.metrics()["prompt_cache.evictions"] == 1
    put(store, (*trunk, 50, 51, 52))
    assert [is_stored(store, ids) for ids in (old, young)] == [True, False]


def test_a_prefix_outlives_all_that_goes_on_from_it():
    store = PromptCache(room_for(12), anywhere)
    put(store, TEN[:5])
    put(store, TEN)
    put(store, (50, 51, 52))
    assert store.stored(key(*TEN)) == 5
    put(store, (60, 61, 62, 63))
    assert store.stored(key(*TEN)) == 5
    put(store, (70,))
    assert store.stored(key(*TEN)) == 0


@pytest.mark.parametrize("as_reader", [True, False], ids=["looked-up", "stored"])
def test_a_path_in_use_is_not_evicted_until_it_is_released(as_reader):
    store = PromptCache(room_for(12), anywhere)
    put(store, TEN, owner=None if as_reader else "row")
    if as_reader:
        assert store.lookup(key(*TEN), "row").length == 9
    assert not put(store, (50, 51, 52))
    assert put(store, (60, 61))
    assert put(store, (70, 71))
    assert is_stored(store, TEN)
    store.release("row")
    assert put(store, (50, 51, 52))
    assert not is_stored(store, TEN)


def test_a_path_that_several_use_stays_until_the_last_is_done():
    store = PromptCache(room_for(10), anywhere)
    put(store, TEN)
    for owner in "ab":
        store.lookup(key(*TEN), owner)
    store.release("a")
    assert not put(store, (50,))
    store.release("b")
    store.release("b")
    assert put(store, (50,))


def test_an_owner_that_goes_on_elsewhere_lets_go_of_the_path_before():
    store = PromptCache(room_for(13), anywhere)
    put(store, TEN)
    put(store, (50, 51, 52))
    store.lookup(key(*TEN), "row")
    store.lookup(key(50, 51, 52), "row")
    assert put(store, (60, 61, 62))
    assert not is_stored(store, TEN)
    assert is_stored(store, (50, 51, 52))


def test_what_is_held_is_held_however_nodes_are_divided_and_joined():
    store = PromptCache(room_for(13), anywhere)
    put(store, TEN)
    store.lookup(key(*TEN), "row")
    put(store, (*TEN[:4], 40))
    put(store, (*TEN[:7], 70))
    put(store, (80,))
    assert not put(store, (90, 91, 92, 93))
    assert is_stored(store, TEN)
    assert look(store, (*TEN, 11)).length == 10


def test_what_cannot_fit_evicts_nothing():
    store = PromptCache(room_for(12), anywhere)
    put(store, TEN[:4])
    put(store, (50, 51, 52), owner="row")
    assert not put(store, range(100, 110))
    assert not put(store, range(100, 200))
    assert is_stored(store, TEN[:4])
    assert store.metrics()["prompt_cache.evictions"] == 0


def thinned(segment):
    return Segment(segment.blocks)


THINNING = Thinning(thinned, reach_tokens=3, has_snapshots=True)


def conversation(store, ids, turns):
    """Store a prompt that grows by two tokens a turn, with a snapshot after each."""
    for turn in range(turns):
        ids = (*ids, 2 * turn, 2 * turn + 1)
        assert put(store, ids, has_snapshot=True)
    return ids


def snapshots(store, ids):
    return [n for n in range(1, len(ids) + 1) if store.has_snapshot(key(*ids[:n]))]


def test_the_middle_of_a_conversation_gives_up_its_snapshots_before_nodes_are_evicted():
    store = PromptCache(room_for(20, snapshots=5), at_snapshots, thinning=THINNING)
    ids = conversation(store, (), 10)
    assert snapshots(store, ids)[-3:] == [16, 18, 20]
    assert len(snapshots(store, ids)) == 5
    assert is_stored(store, ids)
    assert look(store, (*ids, 90)).length == 20
    assert store.metrics()["prompt_cache.evictions"] == 0


def test_with_room_enough_no_snapshot_is_given_up():
    store = PromptCache(room_for(20, snapshots=10), at_snapshots, thinning=THINNING)
    ids = conversation(store, (), 10)
    assert snapshots(store, ids) == list(range(2, 21, 2))


def test_where_prompts_branched_and_system_prompts_end_snapshots_stay():
    store = PromptCache(room_for(30, snapshots=8), at_snapshots, thinning=THINNING)
    put(store, (70, 71, 72), has_snapshot=True)
    store.pin(key(70, 71, 72))
    put(store, (70, 71, 72, 73, 74), has_snapshot=True)
    put(store, (70, 71, 72, 73, 74, 90), has_snapshot=True)
    ids = conversation(store, (70, 71, 72, 73, 74), 9)
    assert snapshots(store, ids)[:2] == [3, 5]
    assert len(snapshots(store, ids)) < 11
    assert store.metrics()["prompt_cache.evictions"] == 0


def test_what_a_cut_at_the_end_of_a_system_prompt_needs_is_not_given_up():
    store = PromptCache(room_for(24, snapshots=7), at_snapshots, thinning=THINNING)
    ids = conversation(store, (), 4)
    store.pin(key(*ids))
    ids = conversation(store, ids, 8)
    assert {8, 20, 22, 24} <= set(snapshots(store, ids))
    assert store.metrics()["prompt_cache.evictions"] == 0


def test_system_prompts_are_evicted_last():
    store = PromptCache(room_for(9), anywhere)
    put(store, (1, 2, 3, 4))
    store.pin(key(1, 2, 3))
    store.check()
    put(store, (50, 51))
    put(store, (60, 61, 62, 63))
    assert store.stored(key(1, 2, 3, 4)) == 3
    put(store, range(70, 76))
    assert store.stored(key(1, 2, 3, 4)) == 3
    put(store, range(80, 88))
    assert store.stored(key(1, 2, 3, 4)) == 0
    assert store.metrics()["prompt_cache.bytes"] == room_for(8)


def test_pinned_system_prompts_take_half_of_the_budget_at_most():
    store = PromptCache(room_for(16), anywhere)
    prompts = [(n, n + 1, n + 2) for n in (10, 20, 30)]
    for ids in prompts:
        put(store, ids)
        store.pin(key(*ids))
        store.check()
    put(store, range(100, 107))
    assert all(is_stored(store, ids) for ids in prompts)
    put(store, range(200, 209))
    assert [is_stored(store, ids) for ids in prompts] == [False, True, True]


def test_what_pinned_system_prompts_share_counts_once():
    store = PromptCache(room_for(16), anywhere)
    prompts = [(1, 2, 3, 4, 5, 6, n) for n in (10, 20)]
    for ids in prompts:
        put(store, ids)
        store.pin(key(*ids))
    for n in range(100, 150, 5):
        put(store, range(n, n + 5))
    assert all(is_stored(store, ids) for ids in prompts)


def test_a_system_prompt_that_is_not_stored_whole_is_not_pinned():
    store = PromptCache(room_for(10), anywhere)
    put(store, (1, 2, 3))
    store.pin(key(1, 2, 3, 4))
    store.pin(key(7))
    store.pin(key())
    store.check()
    put(store, range(50, 60))
    assert store.stored(key(1, 2, 3)) == 0


def test_a_conversation_that_waits_for_a_tool_outlives_one_that_has_ended():
    store = PromptCache(room_for(16), anywhere)
    waiting, ended = (1, 2, 3, 4, 5, 6), (10, 11, 12, 13, 14, 15)
    put(store, waiting, owner="waiting")
    store.release("waiting")
    store.expect("waiting")
    put(store, ended)
    store.record(6, 0, HitKind.MISS)
    put(store, (20, 21, 22, 23, 24, 25))
    assert is_stored(store, waiting)
    assert not is_stored(store, ended)


def test_a_conversation_whose_tool_never_answers_is_given_up_in_the_end():
    store = PromptCache(room_for(12), anywhere)
    waiting = (1, 2, 3, 4, 5, 6)
    put(store, waiting, owner="waiting")
    store.release("waiting")
    store.expect("waiting")
    for n in range(10, 200, 6):
        put(store, range(n, n + 6))
        store.record(6, 0, HitKind.MISS)
    assert not is_stored(store, waiting)


def test_a_leaf_weighs_as_much_as_all_that_is_kept_for_it_alone():
    store = PromptCache(room_for(150, snapshots=3), at_snapshots, thinning=THINNING)
    long, short = tuple(range(100, 200)), tuple(range(10, 30))
    for end in (30, 60, 97, 100):
        put(store, long[:end], has_snapshot=end == 100)
    for _ in range(2):
        store.record(1, 0, HitKind.MISS)
    put(store, short, has_snapshot=True)
    put(store, range(300, 340), has_snapshot=True)
    assert is_stored(store, short)
    assert not is_stored(store, long)


def test_what_the_next_question_drops_goes_before_where_it_parts_and_what_is_older():
    store = PromptCache(room_for(30, snapshots=3), at_snapshots, thinning=THINNING)
    older, asked, said = tuple(range(50, 60)), tuple(range(1, 9)), tuple(range(1, 17))
    for ids in (older, asked, said):
        put(store, ids, has_snapshot=True, owner="row")
    store.note_turn("row", key(*asked))
    store.release("row")
    put(store, range(70, 80), has_snapshot=True)
    assert [is_stored(store, ids) for ids in (older, asked, said)] == [True, True, False]
    assert snapshots(store, said) == [8]


def test_where_the_next_question_parts_is_kept_while_tools_are_called():
    store = PromptCache(room_for(30, snapshots=3), at_snapshots, thinning=THINNING)
    asked, said, ended = tuple(range(1, 9)), tuple(range(1, 17)), tuple(range(50, 60))
    for ids in (ended, asked, said):
        put(store, ids, has_snapshot=True, owner="row")
    store.note_turn("row", key(*asked))
    store.release("row")
    store.expect("row")
    for _ in range(3):
        store.record(1, 0, HitKind.MISS)
    store.resize(store.metrics()["prompt_cache.bytes"] - 1)
    assert snapshots(store, said) == [8, 16]
    assert not is_stored(store, ended)


def test_a_newcomer_that_is_refused_in_the_end_costs_nobody_anything():
    store = PromptCache(room_for(116, snapshots=4), at_snapshots, thinning=THINNING)
    before, dear, idle = tuple(range(900, 904)), tuple(range(100, 200)), (80, 81, 82, 83)
    for ids in (before[:2], before, dear):
        put(store, ids, has_snapshot=True, owner="waiting")
    store.release("waiting")
    store.expect("waiting")
    put(store, idle)
    put(store, range(1, 9), has_snapshot=True, owner="row")
    status = store.metrics()
    known = [snapshots(store, ids) for ids in (before, dear)]
    assert not put(store, range(1, 23), has_snapshot=True, owner="row")
    assert store.metrics() == status
    assert [snapshots(store, ids) for ids in (before, dear)] == known
    assert is_stored(store, idle)


@pytest.mark.parametrize("has_states", [False, True])
def test_a_prompt_that_parts_inside_a_long_node_is_worth_all_that_it_adds(has_states):
    restored = at_snapshots if has_states else anywhere
    snapshots = 2 if has_states else 0
    thinning = THINNING if has_states else NO_THINNING
    store = PromptCache(room_for(20, snapshots=snapshots), restored, thinning=thinning)
    parting = (*TEN[:2], 91, 92, 93, 94, 95)
    for ids in (TEN, tuple(range(50, 60)), parting):
        assert put(store, ids, has_snapshot=has_states)
    assert is_stored(store, parting)


def test_of_conversations_that_saved_as_much_per_byte_the_least_recent_goes_however_long():
    for length in range(2, 60):
        store = PromptCache(room_for(length + 20), anywhere)
        old, young = tuple(range(100, 100 + length)), tuple(range(300, 320))
        put(store, old)
        put(store, young)
        for _ in range(4):
            store.record(1, 0, HitKind.MISS)
        put(store, (9,))
        assert [is_stored(store, ids) for ids in (old, young)] == [False, True]


def test_a_node_that_is_divided_is_not_kept_whole_for_the_books():
    store = PromptCache(room_for(40, snapshots=3), at_snapshots, thinning=THINNING)
    ids = tuple(range(1, 11))
    put(store, ids, has_snapshot=True)
    for end in (12, 14, 16):
        put(store, tuple(range(1, end + 1)), has_snapshot=True)
    store.resize(room_for(16, snapshots=3))
    store.resize(room_for(40, snapshots=3))
    found = store.nodes.tree.match(key(*ids)).last.value.blocks[0]
    whole = weakref.ref(found)
    del found
    put(store, (*ids[:5], 70))
    gc.collect()
    assert whole() is None


def test_the_snapshot_that_saves_fewest_tokens_goes_first():
    store = PromptCache(room_for(60, snapshots=3), at_snapshots, thinning=THINNING)
    ids = tuple(range(1, 61))
    for end in (30, 34, 60):
        assert put(store, ids[:end], has_snapshot=True)
    store.resize(room_for(60, snapshots=2))
    assert snapshots(store, ids) == [30, 60]


def store_once(store, ids):
    """Store the missing part of `ids` for somebody who is not coming back."""
    store.note_once("once")
    is_there = put(store, ids, owner="once")
    store.release("once")
    return is_there


def test_what_is_wanted_once_goes_before_all_that_is_older():
    store = PromptCache(room_for(20), anywhere)
    for start in (10, 20, 30):
        put(store, range(start, start + 5))
    assert store_once(store, range(40, 45))
    put(store, range(50, 55))
    assert [is_stored(store, range(n, n + 5)) for n in (10, 20, 30, 40)] == [True] * 3 + [False]


def test_what_somebody_else_has_gone_on_from_is_wanted_again():
    store = PromptCache(room_for(20), anywhere)
    store_once(store, range(40, 45))
    for start in (10, 20, 30):
        put(store, range(start, start + 5))
    store.note_once("another")
    look(store, (*range(40, 45), 7), owner="another")
    look(store, (*range(40, 45), 7))
    put(store, range(50, 55))
    assert is_stored(store, range(40, 45))
    assert not is_stored(store, range(10, 15))


def test_what_a_request_shares_with_others_is_not_wanted_once():
    store = PromptCache(room_for(12), anywhere)
    put(store, range(1, 6))
    store_once(store, (*range(1, 6), 40, 41, 42))
    put(store, range(50, 56))
    assert store.stored(key(*range(1, 6), 40)) == 5


def test_the_number_of_arrays_is_limited_like_their_bytes():
    store = PromptCache(room_for(100), anywhere, max_arrays=3 * ARRAYS_PER_BLOCK)
    old, used, young, newest = ((n, n + 1, n + 2) for n in (10, 20, 30, 40))
    for ids in (used, old, young):
        put(store, ids)
    look(store, used)
    put(store, newest)
    assert [is_stored(store, ids) for ids in (old, used, young, newest)] == [False, *[True] * 3]


def test_a_node_that_is_divided_has_more_arrays_for_which_others_go():
    store = PromptCache(room_for(100), anywhere, max_arrays=3 * ARRAYS_PER_BLOCK)
    put(store, (1, 2, 3))
    put(store, (50, 51))
    put(store, (1, 2, 9))
    assert [is_stored(store, ids) for ids in ((1, 2, 3), (50, 51), (1, 2, 9))] == [
        True,
        False,
        True,
    ]


def test_of_scarce_arrays_those_of_long_prefixes_stay():
    store = PromptCache(room_for(100), anywhere, max_arrays=3 * ARRAYS_PER_BLOCK)
    put(store, range(100, 140))
    put(store, (10, 11))
    put(store, (20, 21))
    put(store, (30, 31))
    assert is_stored(store, range(100, 140))
    assert not is_stored(store, (10, 11))


def test_a_prefix_of_more_arrays_than_fit_is_not_stored():
    store = PromptCache(room_for(100), anywhere, max_arrays=ARRAYS_PER_BLOCK)
    put(store, (1, 2, 3), owner="row")
    assert not put(store, (1, 2, 3, 4))
    assert is_stored(store, (1, 2, 3))
