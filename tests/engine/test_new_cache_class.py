"""A new class of KV cache is one row: then it is stored, cut, batched, charged and drafted for."""

import mlx.core as mx
import pytest
from drafting import FREE, assert_same, requests_of
from engine_driver import Driver, make_request, prompt_of
from mlx_lm.models.cache import KVCache
from whole_trial import batch_plan, measure

from backend.cache.layers import CACHE_CLASSES, CacheClass, Form, Growth, PositionLayer
from backend.config import TuningOptions
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.kv.layer import RaggedKV
from backend.engine.passes.caches import make_cache_factory
from backend.engine.plan import Batching
from backend.model.checkpoint.upstream import import_mlx_lm

pytestmark = pytest.mark.mlx

BYTES_PER_TOKEN = 1000


class ToyCache(KVCache):
    """A class of its own, as far as upstream's names tell."""


ToyCache.__module__ = KVCache.__module__


def read(cache):
    return cache.keys, cache.values


def write(cache, arrays):
    cache.keys, cache.values = arrays


def give_back(cache, counts):
    (count,) = counts
    cache.offset -= count


ROW = CacheClass(
    kind=lambda _cache, packing: PositionLayer(read, write, packing),
    growth=lambda _cache: Growth(BYTES_PER_TOKEN),
    give_back=give_back,
    keeps_positions=True,
    form=Form.PLAIN,
    pair=read,
)


@pytest.fixture
def network(tiny_models):
    made = import_mlx_lm().load_model(tiny_models("llama"))[0]
    made.make_cache = lambda: [ToyCache() for _ in made.layers]
    return made


@pytest.fixture
def row(monkeypatch):
    monkeypatch.setitem(CACHE_CLASSES, "ToyCache", ROW)


def two_turns(network):
    """Return how much of a conversation's second prompt was stored, and its reply."""
    driver = Driver(network)
    (first,) = driver.run(make_request("first", prompt_of(50)))
    prompt = [*prompt_of(50), *first.token_ids, *prompt_of(9, salt=1)]
    (second,) = driver.run(make_request("second", prompt))
    return second.cached_tokens, second.token_ids


def test_without_a_row_nothing_is_stored_and_rows_take_as_many_tokens(network):
    assert two_turns(network)[0] == 0
    assert not plan_of(network).takes_several


@pytest.mark.usefixtures("row")
def test_prefixes_are_stored_and_cut(network, networks):
    cached, reply = two_turns(network)
    assert cached > 50
    assert reply == two_turns(networks("llama"))[1]


def prefilled(network, length):
    caches = network.make_cache()
    mx.eval(network(mx.array([prompt_of(length)]), cache=caches))
    return caches


def plan_of(network):
    fresh_caches = make_cache_factory(network, TuningOptions())
    return batch_plan(network, fresh_caches, range(64))


@pytest.mark.usefixtures("row")
def test_rows_keep_their_own_lengths(network, networks):
    plan = plan_of(network)
    assert (plan.batching, plan.takes_several) == (Batching.RAGGED, True)
    batch = BatchCaches(plan)
    batch.regroup([], [prefilled(network, 5), prefilled(network, 9)])
    assert {type(layer) for layer in batch.layers} == {RaggedKV}
    requests = requests_of(1, 5)
    assert_same(Driver(network).run(*requests), Driver(networks("llama")).run(*requests))


@pytest.mark.usefixtures("row")
@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_are_taken_back(network, networks, rows):
    accepted = wrong = 0
    for seed in range(4):
        requests = requests_of(seed, rows)
        driver = Driver(network, pass_seconds=FREE)
        assert_same(driver.run(*requests), Driver(networks("llama")).run(*requests))
        metrics = driver.loop.status().metrics
        accepted += metrics["accepted_tokens"]
        wrong += metrics["drafted_tokens"] - metrics["accepted_tokens"]
    assert min(accepted, wrong) > 0


@pytest.mark.usefixtures("row")
def test_its_memory_is_charged(network):
    profile = measure(network, make_cache_factory(network, TuningOptions()))
    assert profile.bytes_per_token == BYTES_PER_TOKEN * len(network.layers)
