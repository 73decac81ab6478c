"""Stored prefixes are used where they lie: a hit copies nothing, and rows hold a prefix once."""

import pytest
from engine_driver import Driver, make_request, prompt_of

from backend.cache import layout
from backend.cache.row_kv import RowKV
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
def test_a_hit_copies_nothing(networks, family):
    driver = Driver(networks(family))
    driver.run(request("first", 7, 8, 9))
    row = Row(request("second", 1, 2))
    driver.session._parts.prefixes.restore(row)
    assert row.fed >= len(PREFIX)
    leaves = referring(row.cache)
    assert leaves
    assert all((leaf.shared, leaf.nbytes) == (row.fed, 0) for leaf in leaves)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_goes_on_with_what_it_has_stored(networks, family):
    driver = Driver(networks(family))
    driver.session.submit(request("first", 7, 8, 9, max_tokens=6))
    while not driver.outcomes.get("first"):
        driver.turn()
    leaves = referring(driver.session._parts.batch._caches.layers)
    assert leaves
    assert all(leaf.shared >= len(PREFIX) > leaf.tail for leaf in leaves)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_on_one_prefix_hold_it_once_and_draw_the_tokens_of_cold_ones(networks, family):
    requests = [request(f"r{i}", 3 * i + 1, i, max_tokens=8 + i) for i in range(5)]
    driver = Driver(networks(family))
    driver.run(request("before"))
    for each in requests:
        driver.session.submit(each)
    shared = []
    while not driver.session.is_idle:
        driver.turn()
        ledger = driver.session._parts.batch._caches._ledger
        shared.append(len(ledger.current.shared) if ledger and ledger.current else 0)
    assert max(shared) > 0
    cold = Driver(networks(family), batches=False, max_cache_bytes=0).run(*requests)
    assert [driver.outcome(each).token_ids for each in requests] == [o.token_ids for o in cold]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_row_that_leaves_copies_nothing_for_itself(networks, family):
    driver = Driver(networks(family))
    parts = driver.session._parts
    row = Row(request("leaves", 1, 2))
    while row.prefill_left:
        parts.prefilling._feeder.feed(row, row.prefill_left)
    parts.prefixes.save(row)
    row.token_ids += prompt_of(40, salt=5)
    parts.prefilling._feeder.feed(row, row.prefill_left)
    leaves = referring(row.cache)
    before = [(leaf.shared, leaf.keys) for leaf in leaves]
    parts.prefixes.leave(row)
    assert row.saved == row.fed
    for leaf, (shared, keys) in zip(leaves, before, strict=True):
        assert leaf.shared == shared > 0
        assert leaf.keys is keys
