"""Clients that look up, store, pin and let go of the same few prefixes, in random order."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from token_blocks import anywhere, at_snapshots, key, put, room_for, segment_of, tokens_of

from backend.cache.eviction import NO_THINNING, Thinning
from backend.cache.kv import Segment
from backend.cache.prompt_cache import PromptCache

pytestmark = pytest.mark.mlx

CLIENTS = 4
STEPS = 1000
LONGEST = 14
THINNING = Thinning(lambda segment: Segment(segment.blocks), reach_tokens=2, has_snapshots=True)


class Client:
    """Random work on a store; each of its operations leaves the counts right."""

    def __init__(self, store: PromptCache, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.name = f"client {seed}"
        self.path: tuple[int, ...] = ()
        self.hits = 0
        self.refusals = 0

    def step(self) -> None:
        work = [self.look, self.look, self.go_on, self.go_on, self.store_late, self.pin]
        self.rng.choice([*work, self.let_go, self.read_status])()
        self.store.check()
        self.see_that_the_path_is_there()

    def ids(self) -> tuple[int, ...]:
        return tuple(self.rng.choices((0, 1, -1), k=self.rng.randint(0, LONGEST)))

    def look(self) -> None:
        ids = self.ids()
        hit = self.store.lookup(key(*ids), self.name)
        assert tokens_of(hit) == ids[: hit.length]
        assert hit.length <= max(len(ids) - 1, 0)
        assert hit.length <= hit.matched <= len(ids)
        if hit.length:
            self.path = ids[: hit.length]
            self.hits += 1

    def go_on(self) -> None:
        """Store the tokens that a row would have computed after its path."""
        self.insert((*self.path, *self.ids())[:LONGEST], known=None)

    def store_late(self) -> None:
        """Store tokens after a prefix that was perhaps never there, or is there no longer."""
        ids = self.ids()
        self.insert(ids, known=self.rng.randint(0, len(ids)))

    def insert(self, ids: tuple[int, ...], known: int | None) -> None:
        if not ids:
            return
        start = self.store.stored(key(*ids)) if known is None else known
        segment = segment_of(ids, start, has_snapshot=self.rng.random() < 0.4)
        if self.store.insert(key(*ids), start, segment, owner=self.name):
            self.path = ids
        else:
            self.refusals += 1

    def pin(self) -> None:
        self.store.pin(key(*self.ids()[:5]))

    def let_go(self) -> None:
        self.store.release(self.name)
        self.path = ()

    def read_status(self) -> None:
        status = self.store.metrics()
        assert 0 <= status["prompt_cache.bytes"] <= status["prompt_cache.budget_bytes"]
        self.store.has_snapshot(key(*self.ids()))

    def see_that_the_path_is_there(self) -> None:
        assert self.store.stored(key(*self.path)) == len(self.path)


@pytest.mark.parametrize(
    ("usable", "thinning"),
    [(anywhere, NO_THINNING), (at_snapshots, NO_THINNING), (at_snapshots, THINNING)],
    ids=["anywhere", "at-snapshots", "thinned"],
)
def test_clients_that_take_turns_leave_the_counts_of_their_store_right(usable, thinning):
    store = PromptCache(room_for(100), usable, thinning=thinning)
    clients = [Client(store, seed) for seed in range(CLIENTS)]
    rng = random.Random(0)
    for _ in range(CLIENTS * STEPS):
        rng.choice(clients).step()
    for client in clients:
        client.let_go()
    store.check()
    assert sum(client.hits for client in clients) > 10
    assert sum(client.refusals for client in clients) > 0
    assert store.metrics()["prompt_cache.evictions"] > 100
    assert put(store, range(100, 200)), "somebody still holds a path"
    assert store.metrics()["prompt_cache.tokens"] == 100


def test_a_call_from_another_thread_than_its_own_is_refused():
    store = PromptCache(room_for(100), anywhere)
    put(store, range(10))
    with ThreadPoolExecutor(1) as pool:
        for call in (
            lambda: store.lookup(key(1, 2), "other"),
            lambda: store.pin(key(1)),
            lambda: store.release("other"),
            store.metrics,
        ):
            with pytest.raises(RuntimeError, match="thread"):
                pool.submit(call).result()
    assert store.metrics()["prompt_cache.tokens"] == 10
