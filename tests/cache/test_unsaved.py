"""Parts of a prompt cache that the disk lacks: written once, the most valuable first, none lost."""

import random

import pytest
from token_blocks import at_snapshots, key, look, put, room_for, segment_of

from backend.cache.eviction import Thinning
from backend.cache.kv import Segment
from backend.cache.prompt_cache import PromptCache

pytestmark = pytest.mark.mlx

OLD, YOUNG = (1, 2, 3, 4), (10, 11, 12, 13)


class Disk:
    """Takes nodes, as many as it has room for.

    Attributes:
        nodes: As they came.
    """

    def __init__(self, room=10**6):
        self.room = room
        self.nodes = []

    def write(self, node):
        if len(self.nodes) == self.room:
            return False
        self.nodes.append(node)
        return True

    @property
    def keys(self):
        return [tuple(node.key) for node in self.nodes]


def cache_on(disk, tokens=100, **options):
    def written(nodes):
        assert all(disk.write(node) for node in nodes)

    return PromptCache(room_for(tokens), at_snapshots, on_evict=written, **options)


def test_what_the_disk_has_lost_is_written_when_memory_gives_it_up_and_not_before():
    disk = Disk()
    store = cache_on(disk)
    put(store, OLD)
    put(store, YOUNG)
    store.save(disk.write)
    store.note_lost(key(*OLD), 0)
    assert not store.has_unsaved
    store.save(disk.write)
    assert sorted(disk.keys) == [OLD, YOUNG]
    store.resize(0)
    assert sorted(disk.keys) == [OLD, OLD, YOUNG]


def test_of_what_the_disk_has_lost_only_that_is_written_again():
    disk = Disk()
    store = cache_on(disk)
    put(store, OLD)
    store.save(disk.write)
    put(store, (*OLD, 5, 6))
    store.save(disk.write)
    store.note_lost(key(*OLD, 5, 6), 4)
    store.note_lost(key(*OLD, 7), 4)
    store.resize(0)
    assert [(node.start, len(node.key)) for node in disk.nodes] == [(0, 4), (4, 6), (4, 6)]


def test_what_is_worth_most_is_written_first_and_the_rest_another_time():
    disk = Disk(room=2)
    store = cache_on(disk)
    put(store, OLD)
    for _ in range(5):
        store.record(4, 0, look(store, (99,)).kind)
    put(store, YOUNG)
    put(store, (*YOUNG, 14))
    store.save(disk.write)
    assert disk.keys == [YOUNG, (*YOUNG, 14)]
    assert store.has_unsaved
    disk.room = 3
    store.save(disk.write)
    assert disk.keys[2:] == [OLD]
    assert not store.has_unsaved


def test_a_state_that_comes_later_is_written_without_the_tokens_before_it():
    disk = Disk()
    store = cache_on(disk)
    put(store, (*OLD, 5, 6))
    store.save(disk.write)
    assert store.insert(key(*OLD), 4, segment_of(OLD, 4, has_snapshot=True))
    store.save(disk.write)
    assert [(node.start, node.segment.tokens) for node in disk.nodes] == [(0, 6), (4, 0)]
    assert disk.nodes[1].segment.snapshot.ids == OLD
    store.note_lost(key(*OLD), 4)
    store.resize(0)
    assert [(node.start, node.segment.tokens) for node in disk.nodes[2:]] == [(4, 0)]


def test_a_node_that_the_disk_has_is_not_joined_with_one_that_it_lacks():
    disk = Disk()
    store = cache_on(disk)
    for ids in ((*OLD, 5, 6), (*OLD, 7, 8)):
        put(store, ids)
    store.save(disk.write)
    store.note_lost(key(*OLD), 0)
    look(store, (*OLD, 7, 8, 9))
    store.resize(room_for(6))
    assert [(node.start, len(node.key)) for node in disk.nodes[3:]] == []
    store.resize(0)
    assert [(node.start, len(node.key)) for node in disk.nodes[3:]] == [(0, 4)]


class Shelf(Disk):
    """Takes everything, and sees that nothing is written that is there."""

    def __init__(self):
        super().__init__()
        self.tokens = set()
        self.states = set()

    def write(self, node):
        ids = tuple(node.key)
        new = {ids[:end] for end in range(node.start + 1, len(ids) + 1)}
        assert not new & self.tokens
        self.tokens |= new
        if node.segment.snapshot is not None:
            assert ids not in self.states
            self.states.add(ids)
        return True


@pytest.mark.parametrize("seed", range(4))
def test_however_nodes_are_divided_and_joined_each_token_and_state_is_written_once(seed):
    rng = random.Random(seed)
    shelf = Shelf()
    thinning = Thinning(lambda segment: Segment(segment.blocks), 0, has_snapshots=True)
    store = cache_on(shelf, 40, thinning=thinning)
    for number in range(150):
        ids = tuple(rng.choice((1, 2)) for _ in range(rng.randint(1, 14)))
        put_or_read(store, shelf, ids, has_snapshot=rng.random() < 0.4)
        look(store, ids)
        if number % rng.randint(2, 9) == 0:
            store.save(shelf.write)
            store.check()
        store.resize(room_for(rng.randint(5, 40)))
    store.save(shelf.write)
    kept = {tuple(node.key) for node in store.nodes.tree.walk()}
    assert len(shelf.tokens) > 60
    assert kept <= shelf.tokens


def put_or_read(store, shelf, ids, *, has_snapshot):
    """Store a prefix; the part of it that is on disk is read from there."""
    on_disk = max((n for n in range(len(ids) + 1) if ids[:n] in shelf.tokens), default=0)
    start = store.stored(key(*ids))
    if start < on_disk:
        segment = segment_of(ids[:on_disk], start)
        store.insert(key(*ids[:on_disk]), start, segment, is_saved=True)
        start = store.stored(key(*ids))
    has_snapshot = has_snapshot and ids not in shelf.states
    if start < len(ids) or (has_snapshot and not store.has_snapshot(key(*ids))):
        store.insert(key(*ids), start, segment_of(ids, start, has_snapshot=has_snapshot))
