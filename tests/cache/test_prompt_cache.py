import pytest
from token_blocks import (
    anywhere,
    at_snapshots,
    is_stored,
    key,
    look,
    put,
    room_for,
    segment_of,
    tokens_of,
)

from backend.cache.kv import Block, Segment
from backend.cache.prompt_cache import PromptCache
from backend.core.metric_table import nested
from backend.core.prefix_listing import HitKind

pytestmark = pytest.mark.mlx

TEN = tuple(range(1, 11))


def roomy(usable=anywhere):
    return PromptCache(room_for(1000), usable)


@pytest.mark.parametrize(
    ("ids", "kind", "length", "matched"),
    [
        pytest.param(TEN, HitKind.EXACT, 9, 10, id="exact"),
        pytest.param((*TEN, 11), HitKind.EXACT, 10, 10, id="exact-but-the-token-left"),
        pytest.param((*TEN, 11, 12), HitKind.SHORTER, 10, 10, id="shorter"),
        pytest.param(TEN[:6], HitKind.LONGER, 5, 6, id="longer"),
        pytest.param(TEN[:3], HitKind.LONGER, 2, 3, id="longer-by-far"),
        pytest.param((*TEN[:6], 90, 91), HitKind.DIVERGING, 6, 6, id="diverging"),
        pytest.param((1, 2, 90), HitKind.DIVERGING, 2, 2, id="diverging-behind-two"),
        pytest.param((1, 90, 91), HitKind.MISS, 0, 1, id="one-token"),
        pytest.param(TEN[:2], HitKind.MISS, 0, 2, id="one-token-but-the-one-left"),
        pytest.param(TEN[:1], HitKind.MISS, 0, 1, id="nothing-but-the-token-left"),
        pytest.param((90, *TEN), HitKind.MISS, 0, 0, id="miss"),
        pytest.param((), HitKind.MISS, 0, 0, id="empty"),
    ],
)
def test_a_prompt_takes_up_the_longest_prefix_but_for_one_token(ids, kind, length, matched):
    store = roomy()
    put(store, TEN)
    hit = look(store, ids)
    assert (hit.kind, hit.length, hit.matched) == (kind, length, matched)


def test_an_empty_store_knows_nothing():
    store = roomy()
    hit = look(store, TEN)
    assert (hit.kind, hit.length, hit.path) == (HitKind.MISS, 0, ())
    assert store.stored(key(*TEN)) == 0
    assert not store.has_snapshot(key(*TEN))


def test_the_most_tokens_win_over_the_entry_that_ends_first():
    store = roomy()
    put(store, TEN[:4])
    put(store, TEN)
    put(store, (*TEN[:7], 70, 71))
    assert look(store, (*TEN[:9], 99)).length == 9
    assert look(store, (*TEN[:7], 70, 99)).length == 8


def test_a_prompt_that_parts_where_others_parted_diverges():
    store = roomy()
    put(store, TEN)
    put(store, (*TEN[:6], 60, 61))
    assert look(store, (*TEN[:6], 70, 71)).kind is HitKind.DIVERGING
    assert look(store, (*TEN[:6], 60, 61, 62, 63)).kind is HitKind.SHORTER


def test_what_is_stored_behind_a_match_is_told():
    store = roomy()
    put(store, TEN)
    assert list(look(store, (*TEN[:6], 90)).beyond) == [7, 8, 9, 10]
    assert list(look(store, (*TEN, 90)).beyond) == []
    put(store, (*TEN, 11, 12))
    assert list(look(store, (*TEN, 90)).beyond) == [11, 12]
    assert list(look(store, (90,)).beyond) == []


def test_only_what_is_missing_is_stored():
    store = roomy()
    put(store, TEN[:4])
    put(store, TEN)
    put(store, (*TEN[:6], 60, 61))
    assert store.metrics()["prompt_cache.bytes"] == room_for(12)
    assert store.metrics()["prompt_cache.tokens"] == 12
    assert all(is_stored(store, ids) for ids in (TEN, (*TEN[:6], 60, 61)))


def test_a_segment_that_begins_too_early_is_cut_to_what_is_missing():
    store = roomy()
    put(store, TEN[:6])
    assert store.insert(key(*TEN), 2, segment_of(TEN, 2))
    assert store.insert(key(*TEN), 0, segment_of(TEN))
    store.check()
    assert store.metrics()["prompt_cache.bytes"] == room_for(10)
    assert look(store, (*TEN, 11)).length == 10


def test_a_segment_whose_beginning_was_evicted_meanwhile_is_refused():
    store = PromptCache(room_for(12), anywhere)
    put(store, TEN[:6])
    put(store, range(20, 32))
    assert not store.insert(key(*TEN), 6, segment_of(TEN, 6), owner="late")
    store.check()
    assert store.stored(key(*TEN)) == 0
    assert put(store, TEN), "a refused owner holds nothing"


def test_a_refused_segment_changes_no_version():
    store = PromptCache(room_for(12), anywhere)
    put(store, TEN)
    version = store.version
    assert not store.insert(key(20, 21, 22), 2, segment_of((20, 21, 22), 2))
    look(store, TEN)
    assert store.version == version
    put(store, (*TEN, 11))
    assert store.version > version


def test_a_prefix_with_state_ends_at_a_snapshot():
    store = roomy(at_snapshots)
    put(store, TEN[:4], has_snapshot=True)
    put(store, TEN)
    assert look(store, (*TEN, 11)).length == 4
    put(store, TEN, has_snapshot=True)
    assert look(store, (*TEN, 11)).length == 10
    assert look(store, TEN).length == 4
    assert look(store, TEN[:4]).kind is HitKind.MISS


def test_a_snapshot_is_attached_to_what_is_stored_without_it():
    store = roomy(at_snapshots)
    put(store, TEN)
    assert not store.has_snapshot(key(*TEN))
    put(store, TEN, has_snapshot=True)
    assert store.has_snapshot(key(*TEN))
    assert store.metrics()["prompt_cache.bytes"] == room_for(10, snapshots=1)


def test_a_snapshot_inside_a_node_divides_it():
    store = roomy(at_snapshots)
    put(store, TEN, has_snapshot=True)
    put(store, TEN[:4], has_snapshot=True)
    assert store.metrics()["prompt_cache.bytes"] == room_for(10, snapshots=2)
    assert store.metrics()["prompt_cache.nodes"] == 2
    hits = [look(store, (*ids, 90)) for ids in (TEN, TEN[:4], TEN[:7])]
    assert [hit.length for hit in hits] == [10, 4, 4]
    assert [hit.path[-1].snapshot.ids for hit in hits] == [TEN, TEN[:4], TEN[:4]]


def test_a_snapshot_is_stored_once():
    store = roomy(at_snapshots)
    put(store, TEN, has_snapshot=True)
    version = store.version
    put(store, TEN, has_snapshot=True)
    assert store.metrics()["prompt_cache.bytes"] == room_for(10, snapshots=1)
    assert store.version == version


def test_a_snapshot_of_another_prompt_of_that_length_is_not_its_own():
    store = roomy(at_snapshots)
    put(store, TEN, has_snapshot=True)
    assert not store.has_snapshot(key(*TEN[:6], 60, 61, 62, 63))
    assert not store.has_snapshot(key(*TEN[:6]))
    assert not store.has_snapshot(key(*TEN, 11))


def test_a_cut_before_the_end_of_a_node_goes_without_its_snapshot():
    store = roomy(anywhere)
    put(store, TEN, has_snapshot=True)
    assert look(store, TEN).path[-1].snapshot is None
    assert look(store, (*TEN, 11)).path[-1].snapshot.ids == TEN


def test_a_hit_stays_whole_when_its_nodes_are_divided_or_evicted():
    store = PromptCache(room_for(12), anywhere)
    put(store, TEN)
    hit = look(store, (*TEN, 11))
    put(store, (*TEN[:5], 50))
    put(store, range(100, 112))
    assert store.stored(key(*TEN)) == 0
    assert tokens_of(hit) == TEN


def test_two_users_of_one_entry_get_paths_of_their_own():
    store = roomy()
    put(store, TEN)
    one, other = (store.lookup(key(*TEN[:n], 99), f"row {n}") for n in (8, 5))
    assert (tokens_of(one), tokens_of(other)) == (TEN[:8], TEN[:5])


def test_keys_of_two_models_never_meet():
    one, other = roomy(), roomy()
    put(one, TEN)
    assert look(other, TEN).kind is HitKind.MISS


def test_image_ids_are_tokens_like_any_other():
    store = roomy()
    put(store, (1, 2, -5, -5, 3))
    assert look(store, (1, 2, -5, -5, 3, 4)).length == 5
    assert look(store, (1, 2, -6, -6, 3, 4)).length == 2


def test_without_a_budget_nothing_is_stored():
    store = PromptCache(0, anywhere)
    assert not put(store, TEN)
    assert look(store, TEN).kind is HitKind.MISS
    assert (store.metrics()["prompt_cache.bytes"], store.metrics()["prompt_cache.nodes"]) == (0, 0)


def test_the_whole_budget_can_be_used():
    store = PromptCache(room_for(10), anywhere)
    assert put(store, TEN)
    assert store.metrics()["prompt_cache.bytes"] == store.metrics()["prompt_cache.budget_bytes"]
    assert put(store, TEN), "nothing is missing, so nothing needs room"
    assert not put(store, (*TEN, 11), owner="row")


def test_tokens_without_bytes_are_stored_and_found():
    """Those of a model that has nothing but states are such, between two snapshots."""
    store = PromptCache(0, anywhere)
    assert store.insert(key(*TEN), 0, Segment((Block(10, ((),)),)))
    store.check()
    assert store.lookup(key(*TEN), "row").length == 9


def test_the_books_count_prompts_tokens_and_kinds():
    store = roomy()
    store.record(100, 60, HitKind.SHORTER)
    store.record(50, 0, HitKind.MISS)
    store.record(20, 19, HitKind.SHORTER)
    status = store.metrics()
    assert (status["prompt_cache.looked_up_tokens"], status["prompt_cache.hit_tokens"]) == (170, 79)
    assert nested(status)["prompt_cache"]["hits"] == {"shorter": 2, "miss": 1}
