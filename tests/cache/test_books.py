"""Counters and listings of a prompt cache, without MLX."""

import pytest
from token_blocks import anywhere, at_snapshots, key, look, put, room_for

from backend.cache.prompt_cache import (
    MAX_KNOWN,
    MAX_SPANS,
    SPAN_S,
    EvictedPrefixes,
    PromptCache,
    ReuseHistory,
)
from backend.core.prefix_listing import HitKind, ListingRequest

pytestmark = pytest.mark.mlx

SYSTEM = tuple(range(1, 9))
FIRST, SECOND = (*SYSTEM, 20, 21, 22), (*SYSTEM, 30, 31, 32, 33)


def cache(tokens=1000, usable=anywhere):
    return PromptCache(room_for(tokens), usable, on_evict=lambda _nodes: None)


def listed(store, *, most=100, head_tokens=0, has_disk=False):
    request = ListingRequest(max_prefixes=most, head_tokens=head_tokens)
    return store.listing(request, has_disk=has_disk)


def spans_of(listing):
    """Where each prefix begins and ends, and the end of the one that it goes on from."""
    ends = {each.number: each.start + each.tokens for each in listing.prefixes}
    return [(each.start, ends[each.number], ends.get(each.parent, 0)) for each in listing.prefixes]


def test_every_node_is_told_with_the_one_that_it_goes_on_from():
    store = cache()
    put(store, FIRST)
    put(store, SECOND)
    listing = listed(store)
    assert sorted(spans_of(listing)) == [(0, 8, 0), (8, 11, 8), (8, 12, 8)]
    assert sum(each.bytes for each in listing.prefixes) == store.metrics()["prompt_cache.bytes"]


@pytest.mark.parametrize("most", range(1, 12))
def test_of_many_nodes_the_best_are_told_and_their_parents_always(most):
    store = cache()
    for branch in range(8):
        put(store, (*SYSTEM[:branch], 100 + branch, 200 + branch))
    listing = listed(store, most=most)
    assert len(listing.prefixes) == most
    assert all(start == above for start, _, above in spans_of(listing))
    worst_told = min(each.worth for each in listing.prefixes)
    left = {each.start: each.worth for each in listed(store).prefixes}
    told = {each.start for each in listing.prefixes}
    assert all(worst_told >= worth for start, worth in left.items() if start not in told)


def test_a_request_counts_as_one_hit_however_often_it_looks():
    store = cache()
    put(store, FIRST)
    for _ in range(3):
        store.lookup(key(*SYSTEM, 40, 41), "again")
    put(store, (*SYSTEM, 40, 41), owner="again")
    store.release("again")
    look(store, (*FIRST, 50))
    put(store, SECOND)
    hits = {each.start + each.tokens: each.hits for each in listed(store).prefixes}
    assert hits == {8: 2, 10: 0, 11: 1, 12: 0}


def test_pins_uses_and_the_disk_are_told():
    store = cache()
    put(store, FIRST)
    put(store, SECOND, owner="running")
    store.pin(key(*SYSTEM))
    store.save(lambda _: True)
    put(store, (70, 71))
    told = {each.start + each.tokens: each for each in listed(store, has_disk=True).prefixes}
    assert [each.is_pinned for each in told.values()].count(True) == 1
    assert told[8].is_pinned
    assert told[8].place.value == "system"
    assert (told[8].is_in_use, told[11].is_in_use, told[12].is_in_use) == (True, False, True)
    assert (told[12].is_on_disk, told[2].is_on_disk) == (True, False)
    assert not any(each.is_on_disk for each in listed(store).prefixes)


def test_tokens_leave_the_cache_only_if_they_are_asked_for():
    store = cache()
    put(store, FIRST)
    assert listed(store).prefixes[0].head == ()
    assert listed(store, head_tokens=3).prefixes[0].head == (1, 2, 3)


def test_what_was_evicted_and_is_wanted_again_is_counted_once_for_each_request():
    store = cache(tokens=12)
    put(store, FIRST)
    put(store, tuple(range(50, 62)))
    assert store.metrics()["prompt_cache.evictions"] == 1
    look(store, (*FIRST, 23))
    put(store, FIRST)
    look(store, (*FIRST, 23))
    listing = listed(store, head_tokens=2)
    assert listing.recomputed_tokens == len(FIRST)
    assert store.metrics()["prompt_cache.recomputed_tokens"] == len(FIRST)
    (again,) = listing.recomputed
    assert (again.start, again.tokens, again.times) == (0, len(FIRST), 1)
    assert again.head == FIRST[:2]


def test_of_what_was_evicted_only_what_is_lacking_counts():
    evicted = EvictedPrefixes()
    evicted.note_evicted(key(*FIRST), 8)
    evicted.note_evicted(key(*SYSTEM), 0)
    evicted.note_prompt(key(*SECOND), 0)
    assert evicted.recomputed_tokens == 8
    evicted.note_prompt(key(*FIRST, 23), 10)
    assert evicted.recomputed_tokens == 8 + 1


def test_what_costs_most_is_told_first_and_outlives_what_nobody_wants():
    evicted = EvictedPrefixes()
    for times in range(3):
        evicted.note_evicted(key(*FIRST), 8)
        evicted.note_prompt(key(*FIRST), times)
    evicted.note_evicted(key(*SYSTEM), 0)
    evicted.note_prompt(key(*SYSTEM), 0)
    for number in range(2 * MAX_KNOWN):
        evicted.note_evicted(key(1000 + number), 0)
    assert [(each.times, each.recomputed_tokens) for each in evicted.worst(0)] == [(3, 9), (1, 8)]


def test_what_is_stored_without_a_state_to_go_on_from_is_counted():
    store = cache(usable=at_snapshots)
    put(store, SYSTEM, has_snapshot=True)
    put(store, FIRST)
    assert look(store, (*FIRST, 90)).length == 8
    assert listed(store).stateless_tokens == 3
    assert store.metrics()["prompt_cache.stateless_tokens"] == 3


def test_reuse_is_told_by_spans_of_time():
    now = [10.0 * SPAN_S]
    history = ReuseHistory(lambda: now[0])
    history.record(100, 10)
    history.record(50, 50)
    now[0] += 2.5 * SPAN_S
    history.record(8, 2)
    first, last = history.spans()
    assert (first.requests, first.looked_up_tokens, first.hit_tokens) == (2, 150, 60)
    assert (first.age_s, last.age_s) == (2.5 * SPAN_S, 0.5 * SPAN_S)
    now[0] += (MAX_SPANS - 1) * SPAN_S
    assert [span.requests for span in history.spans()] == [1]


def test_a_lookup_is_a_part_of_the_history():
    store = cache()
    store.record(11, 8, HitKind.SHORTER)
    (span,) = listed(store).spans
    assert (span.requests, span.looked_up_tokens, span.hit_tokens) == (1, 11, 8)


def test_an_evicted_prefix_counts_once_until_it_is_evicted_again():
    evicted, prompt = EvictedPrefixes(), key(*FIRST, 50)
    for times in (1, 2):
        evicted.note_evicted(key(*FIRST), 8)
        for _ in range(3):
            evicted.note_prompt(prompt, stored=0)
        assert evicted.recomputed_tokens == times * 3
        (told,) = evicted.worst(head_tokens=0)
        assert (told.times, told.recomputed_tokens) == (times, times * 3)
