"""Forecasts of the prompt cache: which conversations come back, when, and where they part."""

import pytest
from token_blocks import anywhere, at_snapshots, is_stored, key, look, put, room_for, segment_of

from backend.cache.eviction import Thinning
from backend.cache.kv import Segment
from backend.cache.prompt_cache import PromptCache

pytestmark = pytest.mark.mlx

STATES = Thinning(lambda segment: Segment(segment.blocks), reach_tokens=0, has_snapshots=True)
CONVERSATIONS = [tuple(range(n, n + 10)) for n in (100, 200, 300, 400)]


def turn(store, ids):
    """Continue a conversation that calls a tool every time; return the count of restored tokens."""
    name = str(ids[0])
    hit = store.lookup(key(*ids, 0), name)
    store.record(len(ids), hit.length, hit.kind)
    put(store, ids, owner=name)
    store.release(name)
    store.expect(name)
    return hit.length


def test_agents_that_take_turns_in_too_little_room_do_not_drive_each_other_out():
    store = PromptCache(room_for(30), anywhere)
    for _ in range(5):
        restored = [turn(store, ids) for ids in CONVERSATIONS[:3]]
    assert restored == [10, 10, 10]
    restored = [turn(store, ids) for _ in range(12) for ids in CONVERSATIONS]
    assert sum(restored[-24:]) >= 120


def full_of_agents_in_turn():
    """A store without room, whose three conversations are due one after another."""
    store = PromptCache(room_for(30), anywhere)
    for _ in range(5):
        for ids in CONVERSATIONS[:3]:
            turn(store, ids)
    return store


def test_a_conversation_does_not_drive_out_others_that_are_due_before_it():
    store = full_of_agents_in_turn()
    assert not put(store, CONVERSATIONS[3], owner="running")
    assert all(is_stored(store, ids) for ids in CONVERSATIONS[:3])


def test_what_another_request_waits_for_is_stored_though_others_are_due():
    store = full_of_agents_in_turn()
    store.lookup(key(*CONVERSATIONS[3], 1), "waiting")
    assert put(store, CONVERSATIONS[3], owner="running")
    store.release("waiting")
    store = full_of_agents_in_turn()
    ids = CONVERSATIONS[3]
    assert store.insert(key(*ids), 0, segment_of(ids), is_saved=True)


@pytest.mark.parametrize("has_turn", [True, False])
def test_a_snapshot_counts_for_the_places_below_that_fall_back_on_it(has_turn):
    store = PromptCache(room_for(100, snapshots=9), at_snapshots, thinning=STATES)
    older, younger = tuple(range(1, 17)), tuple(range(50, 66))
    for ids in (older, younger):
        put(store, ids[:8], has_snapshot=True, owner=str(ids[0]))
        put(store, ids[:10], owner=str(ids[0]))
        put(store, ids, has_snapshot=True, owner=str(ids[0]))
    if has_turn:
        store.note_turn("1", key(*older[:10]))
    store.resize(store.metrics()["prompt_cache.bytes"] - 1)
    kept = [store.has_snapshot(key(*ids[:8])) for ids in (older, younger)]
    assert kept == ([True, False] if has_turn else [False, True])


def test_a_conversation_that_went_another_way_does_not_come_back_to_where_it_was():
    store = PromptCache(room_for(40), anywhere)
    ended, asked = tuple(range(500, 510)), CONVERSATIONS[0]
    put(store, ended)
    turn(store, asked)
    turn(store, (*asked, *range(10)))
    look(store, (*asked, *range(20, 30)))
    put(store, (*asked, *range(20, 30)))
    put(store, tuple(range(700, 710)))
    assert [is_stored(store, ids) for ids in (ended, (*asked, 20))] == [True, True]
    assert store.stored(key(*asked, *range(10))) == len(asked)


@pytest.mark.parametrize("has_left", [True, False])
def test_a_caller_that_left_sends_the_prompt_again_and_nobody_continues_its_reply(has_left):
    store = PromptCache(room_for(100, snapshots=9), at_snapshots, thinning=STATES)
    prompt, reply = tuple(range(1, 13)), tuple(range(20, 26))
    store.lookup(key(*prompt), "row")
    put(store, prompt[:-1], has_snapshot=True, owner="row")
    put(store, (*prompt, *reply), has_snapshot=True, owner="row")
    store.release("row")
    if has_left:
        store.expect("row", is_again=True)
    store.resize(store.metrics()["prompt_cache.bytes"] - 1)
    kept = [store.has_snapshot(key(*ids)) for ids in (prompt[:-1], (*prompt, *reply))]
    assert kept == [has_left, not has_left]
