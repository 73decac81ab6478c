"""Stored prefixes are used where they lie: a hit copies nothing, and rows hold a prefix once."""

import pytest
from engine_driver import Driver, make_request, prompt_of, room_for
from wrapped_network import WrappedNetwork

from backend.cache import layout
from backend.cache.kv import RowKV
from backend.cache.radix import TokenKey
from backend.core.request import CacheHint
from backend.engine.rows.row import Row

pytestmark = pytest.mark.mlx

FAMILIES = ["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next", "nemotron_h"]
PREFIX = prompt_of(90)


@pytest.fixture(autouse=True)
def _short_references(monkeypatch):
    monkeypatch.setattr(layout, "MIN_REFERENCE_TOKENS", 8)


def referring(caches):
    return [leaf for leaf in caches if isinstance(leaf, RowKV)]


def request(name, *tail, **options):
    return make_request(name, [*PREFIX, *tail], boundaries=[len(PREFIX)], **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_a_hit_copies_nothing(networks, family):
    driver = Driver(networks(family))
    driver.run(request("first", 7, 8, 9))
    row = Row(request("second", 1, 2))
    driver.loop.prefixes.restore(row)
    assert row.fed >= len(PREFIX)
    leaves = referring(row.cache)
    assert leaves
    assert all((leaf.shared, leaf.nbytes) == (row.fed, 0) for leaf in leaves)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_a_row_goes_on_with_what_it_has_stored(networks, family):
    driver = Driver(networks(family))
    driver.loop.requests.submit(request("first", 7, 8, 9, max_tokens=6))
    while not driver.outcomes.get("first"):
        driver.turn()
    leaves = referring(driver.loop.batch.caches.layers)
    assert leaves
    assert all(leaf.shared >= len(PREFIX) > leaf.tail for leaf in leaves)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_rows_on_one_prefix_hold_it_once_and_draw_the_tokens_of_cold_ones(networks, family):
    requests = [request(f"r{i}", 3 * i + 1, i, max_tokens=8 + i) for i in range(5)]
    driver = Driver(networks(family))
    driver.run(request("before"))
    for each in requests:
        driver.loop.requests.submit(each)
    shared = []
    while not driver.loop.is_idle:
        driver.turn()
        ledger = driver.loop.batch.caches.ledger
        shared.append(len(ledger.current.shared) if ledger and ledger.current else 0)
    assert max(shared) > 0
    cold = Driver(networks(family), batches=False, max_cache_bytes=0).run(*requests)
    assert [driver.outcome(each).token_ids for each in requests] == [o.token_ids for o in cold]


LONG = prompt_of(700, salt=2)


def on_long(count):
    """Requests that go on from one prefix, each in its own way."""
    return [make_request(f"r{i}", [*LONG, 3 * i + 1, i, 7], max_tokens=9) for i in range(count)]


def short_of_memory(network, rows):
    """A session with room for the prefix, and for so many rows beyond it."""
    room = room_for(network, len(LONG)) + room_for(network, 40, rows=rows)
    driver = Driver(network, max_kv_bytes=room)
    driver.run(make_request("before", LONG, max_tokens=1))
    return driver


def test_admission_charges_a_prefix_once(networks):
    driver = short_of_memory(networks("llama"), rows=5)
    requests = on_long(5)
    for each in requests:
        driver.loop.requests.submit(each)
    driver.turn()
    status = driver.loop.status()
    assert (status.metrics["slots_taken"], status.metrics["waiting"]) == (5, 0)
    prefix = room_for(networks("llama"), len(LONG)) - room_for(networks("llama"), 0)
    assert prefix <= status.memory_bytes["kv_shared"] < 1.01 * prefix
    while not all(row.generated_tokens for row in status.requests):
        driver.turn()
        status = driver.loop.status()
    assert all(prefix <= row.kv_shared_bytes < 1.01 * prefix for row in status.requests)
    assert all(0 < row.kv_bytes <= room_for(networks("llama"), 40) for row in status.requests)
    driver.run()
    outcomes = [driver.outcome(each) for each in requests]
    cold = Driver(networks("llama"), batches=False, max_cache_bytes=0).run(*requests)
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in cold]
    assert [o.cached_tokens for o in outcomes] == [700] * 5
    assert driver.loop.status().memory_bytes["kv_shared"] == 0


def test_what_rows_use_is_not_evicted_for_others(networks):
    driver = short_of_memory(networks("llama"), rows=3)
    requests = on_long(2)
    others = [make_request(f"other {i}", prompt_of(200, salt=9 + i)) for i in range(6)]
    outcomes = driver.run(*requests, *others)
    cold = Driver(networks("llama"), batches=False, max_cache_bytes=0).run(*requests, *others)
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in cold]


class FailsOnce(WrappedNetwork):
    """Fails one step of several rows."""

    has_failed = False

    def __call__(self, inputs, cache):
        if inputs.shape[0] > 1 and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("failed once")
        return super().__call__(inputs, cache)


def test_rows_that_lose_their_prefix_wait_for_memory_of_their_own(networks):
    network = FailsOnce(networks("llama"))
    driver = short_of_memory(network, rows=5)
    requests = on_long(4)
    outcomes = driver.run(*requests)
    assert network.has_failed
    cold = Driver(networks("llama"), batches=False, max_cache_bytes=0).run(*requests)
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in cold]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_row_that_leaves_copies_nothing_for_itself(networks, family):
    driver = Driver(networks(family))
    parts = driver.loop
    row = Row(request("leaves", 1, 2))
    while row.prefill_left:
        parts.prefilling.feeder.feed(row, row.prefill_left)
    parts.prefixes.save(row)
    row.token_ids += prompt_of(40, salt=5)
    parts.prefilling.feeder.feed(row, row.prefill_left)
    leaves = referring(row.cache)
    before = [(leaf.shared, leaf.keys) for leaf in leaves]
    parts.prefixes.leave(row)
    assert row.saved == row.fed
    for leaf, (shared, keys) in zip(leaves, before, strict=True):
        assert leaf.shared == shared > 0
        assert leaf.keys is keys


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_it_is_told_where_a_prompt_parts_from_a_stored_one(networks, family):
    driver = Driver(networks(family))
    base = prompt_of(120, salt=4)
    [first] = driver.run(make_request("first", base))
    [again] = driver.run(make_request("again", base))
    edited = [*base[:70], 5, 5, *base[72:], 9]
    [parted] = driver.run(make_request("edited", edited))
    assert (first.parted_at, again.parted_at, parted.parted_at) == (0, 0, 70)
    [other] = driver.run(make_request("other", prompt_of(50, salt=8)))
    assert other.parted_at == 0


def test_a_conversation_is_kept_or_let_go_as_its_caller_says(networks):
    prompts = [prompt_of(100, salt=salt) for salt in range(4)]
    driver = Driver(networks("llama"), max_cache_bytes=3 * prefix_bytes(networks("llama"), 120))
    hints = (CacheHint.KEEP, CacheHint.NONE, CacheHint.ONCE, CacheHint.NONE)
    for i, (prompt, hint) in enumerate(zip(prompts, hints, strict=True)):
        driver.run(make_request(f"r{i}", prompt, cache_hint=hint, max_tokens=3))
    store = driver.loop.prefixes.store
    stored = [store.stored(TokenKey.from_ids(prompt)) for prompt in prompts]
    assert stored == [100, 100, 0, 100]
    driver.run(make_request("last", prompt_of(100, salt=9), max_tokens=3))
    stored = [store.stored(TokenKey.from_ids(prompt)) for prompt in prompts]
    assert stored == [100, 0, 0, 100]


def prefix_bytes(network, tokens):
    return room_for(network, tokens) - room_for(network, 0)
