import pytest
from token_blocks import (
    BYTES_PER_TOKEN,
    SNAPSHOT_BYTES,
    anywhere,
    at_snapshots,
    look,
    put,
    segment_of,
    tokens_of,
)

from backend.cache.kv import Segment
from backend.cache.node_store import Thinning
from backend.cache.prompt_cache import PromptCache
from backend.cache.token_key import TokenKey
from backend.core.status import HitKind

pytestmark = pytest.mark.mlx

TEN = tuple(range(1, 11))


def key(*ids):
    return TokenKey.from_ids(ids)


def room_for(tokens, snapshots=0):
    return tokens * BYTES_PER_TOKEN + snapshots * SNAPSHOT_BYTES


def roomy(usable=anywhere):
    return PromptCache(room_for(1000), usable)


def is_stored(store, ids):
    return store.stored(key(*ids)) == len(ids)


@pytest.mark.parametrize(
    ("ids", "kind", "length", "matched"),
    [
        pytest.param(TEN, HitKind.EXACT, 9, 10, id="exact"),  # lesson 25
        pytest.param((*TEN, 11), HitKind.EXACT, 10, 10, id="exact-but-the-token-left"),
        pytest.param((*TEN, 11, 12), HitKind.SHORTER, 10, 10, id="shorter"),
        pytest.param(TEN[:6], HitKind.LONGER, 5, 6, id="longer"),  # lesson 26
        pytest.param(TEN[:3], HitKind.LONGER, 2, 3, id="longer-by-far"),
        pytest.param((*TEN[:6], 90, 91), HitKind.DIVERGING, 6, 6, id="diverging"),  # lesson 30
        pytest.param((1, 2, 90), HitKind.DIVERGING, 2, 2, id="diverging-behind-two"),
        pytest.param((1, 90, 91), HitKind.MISS, 0, 1, id="one-token"),  # lesson 107
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


def test_the_most_tokens_win_over_the_entry_that_ends_first():  # lesson 31
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


def test_only_what_is_missing_is_stored():  # lesson 33
    store = roomy()
    put(store, TEN[:4])
    put(store, TEN)
    put(store, (*TEN[:6], 60, 61))
    assert store.status().bytes == room_for(12)
    assert store.status().tokens == 12
    assert all(is_stored(store, ids) for ids in (TEN, (*TEN[:6], 60, 61)))


def test_a_segment_that_begins_too_early_is_cut_to_what_is_missing():
    store = roomy()
    put(store, TEN[:6])
    assert store.insert(key(*TEN), 2, segment_of(TEN, 2))
    assert store.insert(key(*TEN), 0, segment_of(TEN))
    store.check()
    assert store.status().bytes == room_for(10)
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


def test_a_prefix_with_state_ends_at_a_snapshot():  # lessons 27, 35, 54
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
    assert store.status().bytes == room_for(10, snapshots=1)


def test_a_snapshot_inside_a_node_divides_it():  # lesson 34
    store = roomy(at_snapshots)
    put(store, TEN, has_snapshot=True)
    put(store, TEN[:4], has_snapshot=True)
    assert store.status().bytes == room_for(10, snapshots=2)
    assert store.status().nodes == 2
    hits = [look(store, (*ids, 90)) for ids in (TEN, TEN[:4], TEN[:7])]
    assert [hit.length for hit in hits] == [10, 4, 4]
    assert [hit.path[-1].snapshot.ids for hit in hits] == [TEN, TEN[:4], TEN[:4]]


def test_a_snapshot_is_stored_once():
    store = roomy(at_snapshots)
    put(store, TEN, has_snapshot=True)
    version = store.version
    put(store, TEN, has_snapshot=True)
    assert store.status().bytes == room_for(10, snapshots=1)
    assert store.version == version


def test_a_snapshot_of_another_prompt_of_that_length_is_not_its_own():
    store = roomy(at_snapshots)
    put(store, TEN, has_snapshot=True)
    assert not store.has_snapshot(key(*TEN[:6], 60, 61, 62, 63))
    assert not store.has_snapshot(key(*TEN[:6]))
    assert not store.has_snapshot(key(*TEN, 11))


def test_a_cut_before_the_end_of_a_node_goes_without_its_snapshot():  # lesson 55
    store = roomy(anywhere)
    put(store, TEN, has_snapshot=True)
    assert look(store, TEN).path[-1].snapshot is None
    assert look(store, (*TEN, 11)).path[-1].snapshot.ids == TEN


def test_the_least_recent_leaf_goes_first_and_no_more_than_need_be():  # lesson 107
    store = PromptCache(room_for(14), anywhere)
    trunk = (1, 2, 3, 4, 5)
    old, used, young = ((*trunk, n, n + 1, n + 2) for n in (10, 20, 30))
    for ids in (old, used, young):
        put(store, ids)
    look(store, old)
    put(store, (*trunk, 40, 41))
    assert [is_stored(store, ids) for ids in (old, used, young)] == [True, False, True]
    assert store.status().evictions == 1
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
    assert store.status().evictions == 0


def thinned(segment):
    return Segment(segment.blocks)


THINNING = Thinning(thinned, reach_tokens=3, has_snapshots=True)


def conversation(store, ids, turns):
    """Store a prompt that grows by two tokens a turn, with a snapshot behind each."""
    for turn in range(turns):
        ids = (*ids, 2 * turn, 2 * turn + 1)
        assert put(store, ids, has_snapshot=True)
    return ids


def snapshots(store, ids):
    return [n for n in range(1, len(ids) + 1) if store.has_snapshot(key(*ids[:n]))]


def test_the_middle_of_a_conversation_gives_up_its_snapshots_before_nodes_are_evicted():
    store = PromptCache(room_for(20, snapshots=5), at_snapshots, thinning=THINNING)
    ids = conversation(store, (), 10)
    assert snapshots(store, ids) == [12, 14, 16, 18, 20]
    assert is_stored(store, ids)
    assert look(store, (*ids, 90)).length == 20
    assert store.status().evictions == 0


def test_with_room_enough_no_snapshot_is_given_up():
    store = PromptCache(room_for(20, snapshots=10), at_snapshots, thinning=THINNING)
    ids = conversation(store, (), 10)
    assert snapshots(store, ids) == list(range(2, 21, 2))


def test_where_prompts_branched_and_system_prompts_end_snapshots_stay():
    store = PromptCache(room_for(30, snapshots=8), at_snapshots, thinning=THINNING)
    put(store, (70, 71, 72), has_snapshot=True)
    store.keep(key(70, 71, 72))
    put(store, (70, 71, 72, 73, 74), has_snapshot=True)
    put(store, (70, 71, 72, 73, 74, 90), has_snapshot=True)
    ids = conversation(store, (70, 71, 72, 73, 74), 9)
    assert snapshots(store, ids)[:2] == [3, 5]
    assert len(snapshots(store, ids)) < 11
    assert store.status().evictions == 0


def test_what_a_cut_at_the_end_of_a_system_prompt_needs_is_not_given_up():
    store = PromptCache(room_for(24, snapshots=7), at_snapshots, thinning=THINNING)
    ids = conversation(store, (), 4)
    store.keep(key(*ids))
    ids = conversation(store, ids, 8)
    assert snapshots(store, ids) == [6, 8, 16, 18, 20, 22, 24]
    assert store.status().evictions == 0


def test_system_prompts_are_evicted_last():
    store = PromptCache(room_for(9), anywhere)
    put(store, (1, 2, 3, 4))
    store.keep(key(1, 2, 3))
    store.check()
    put(store, (50, 51))
    put(store, (60, 61, 62, 63))
    assert store.stored(key(1, 2, 3, 4)) == 3
    put(store, range(70, 76))
    assert store.stored(key(1, 2, 3, 4)) == 3
    put(store, range(80, 88))
    assert store.stored(key(1, 2, 3, 4)) == 0
    assert store.status().bytes == room_for(8)


def test_kept_system_prompts_take_half_of_the_budget_at_most():
    store = PromptCache(room_for(16), anywhere)
    prompts = [(n, n + 1, n + 2) for n in (10, 20, 30)]
    for ids in prompts:
        put(store, ids)
        store.keep(key(*ids))
        store.check()
    put(store, range(100, 107))
    assert all(is_stored(store, ids) for ids in prompts)
    put(store, range(200, 209))
    assert [is_stored(store, ids) for ids in prompts] == [False, True, True]


def test_what_kept_system_prompts_share_counts_once():
    store = PromptCache(room_for(16), anywhere)
    prompts = [(1, 2, 3, 4, 5, 6, n) for n in (10, 20)]
    for ids in prompts:
        put(store, ids)
        store.keep(key(*ids))
    for n in range(100, 150, 5):
        put(store, range(n, n + 5))
    assert all(is_stored(store, ids) for ids in prompts)


def test_a_system_prompt_that_is_not_stored_whole_is_not_kept():
    store = PromptCache(room_for(10), anywhere)
    put(store, (1, 2, 3))
    store.keep(key(1, 2, 3, 4))
    store.keep(key(7))
    store.keep(key())
    store.check()
    put(store, range(50, 60))
    assert store.stored(key(1, 2, 3)) == 0


def test_a_hit_stays_whole_when_its_nodes_are_divided_or_evicted():
    store = PromptCache(room_for(12), anywhere)
    put(store, TEN)
    hit = look(store, (*TEN, 11))
    put(store, (*TEN[:5], 50))
    put(store, range(100, 112))
    assert store.stored(key(*TEN)) == 0
    assert tokens_of(hit) == TEN


def test_two_users_of_one_entry_get_paths_of_their_own():  # lesson 107
    store = roomy()
    put(store, TEN)
    one, other = (store.lookup(key(*TEN[:n], 99), f"row {n}") for n in (8, 5))
    assert (tokens_of(one), tokens_of(other)) == (TEN[:8], TEN[:5])


def test_keys_of_two_models_never_meet():  # lesson 107
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
    assert (store.status().bytes, store.status().nodes) == (0, 0)


def test_the_whole_budget_can_be_used():
    store = PromptCache(room_for(10), anywhere)
    assert put(store, TEN)
    assert store.status().bytes == store.status().budget_bytes
    assert put(store, TEN), "nothing is missing, so nothing needs room"
    assert not put(store, (*TEN, 11), owner="row")


def test_what_has_no_bytes_is_stored_and_found():
    """The tokens of a model that has nothing but states weigh nothing between two snapshots."""
    store = PromptCache(0, anywhere)
    segment = segment_of(TEN)
    object.__setattr__(segment, "blocks", tuple(map(Weightless, segment.blocks)))
    assert store.insert(key(*TEN), 0, segment)
    store.check()
    assert store.lookup(key(*TEN), "row").length == 9


class Weightless:
    """A block of layers without positions."""

    nbytes = 0
    layers = ()

    def __init__(self, block):
        self.tokens = block.tokens


def test_the_books_count_prompts_tokens_and_kinds():  # lesson 46
    store = roomy()
    store.record(100, 60, HitKind.SHORTER)
    store.record(50, 0, HitKind.MISS)
    store.record(20, 19, HitKind.SHORTER)
    status = store.status()
    assert (status.looked_up_tokens, status.hit_tokens) == (170, 79)
    assert status.hits == {HitKind.SHORTER: 2, HitKind.MISS: 1}
