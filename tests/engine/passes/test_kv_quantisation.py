"""Quantised KV caches, and a prompt cache that keeps fewer bits than the rows have."""

import mlx.core as mx
import pytest
from engine_driver import VOCAB, Driver, make_request, prompt_of
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache
from whole_trial import WholeTrial, batch_plan

from backend.config import TuningOptions
from backend.engine.kv.layer import QuantizedKV
from backend.engine.passes.caches import CacheFactory, make_cache_factory
from backend.engine.plan import Batching, BatchPlan

pytestmark = pytest.mark.mlx

WIDE = ["llama_wide", "gemma3_wide", "qwen3_next_wide"]
CUTTABLE = WIDE[:2]
BASE = prompt_of(150)
NEW = prompt_of(60, salt=3)
PROMPTS = {
    "exact": BASE,
    "longer": [*BASE, *NEW],
    "shorter": BASE[:90],
    "diverging": [*BASE[:90], *NEW],
}


def factory(network, **tuning):
    return make_cache_factory(network, TuningOptions.of(**tuning))


def kinds(caches):
    return [type(cache).__name__ for cache in caches]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.one_in(5)
def test_a_warm_prompt_gives_the_tokens_of_a_cold_one(networks, family, bits, name):
    request = make_request("second", PROMPTS[name])
    options = {"batches": False, "kv_bits": bits}
    [cold] = Driver(networks(family), max_cache_bytes=0, **options).run(request)
    driver = Driver(networks(family), **options)
    driver.run(make_request("first", BASE, boundaries=[64], max_tokens=3))
    [warm] = driver.run(request)
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens >= 64 > cold.cached_tokens


@pytest.mark.parametrize("family", WIDE)
def test_a_second_turn_takes_up_prompt_and_reply(networks, family):
    options = {"batches": False, "kv_bits": 8}
    driver = Driver(networks(family), **options)
    [first] = driver.run(make_request("first", BASE, max_tokens=40))
    second = make_request("second", [*BASE, *first.token_ids, *NEW])
    [warm] = driver.run(second)
    assert warm.cached_tokens == len(BASE) + 39
    assert [warm.token_ids] == [
        o.token_ids for o in Driver(networks(family), max_cache_bytes=0, **options).run(second)
    ]


def test_a_prompt_of_one_token_begins_with_quantised_caches_too(networks):
    driver = Driver(networks("llama_wide"), batches=False, kv_bits=8)
    driver.loop.requests.submit(make_request("one", [5]))
    driver.turn()
    assert driver.loop.status().memory_bytes["kv_active"] > 0
    assert kinds(driver.loop.batch.caches.layers) == ["QuantizedKVCache"] * 2


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama_wide", ["QuantizedKVCache", "QuantizedKVCache"]),
        ("gemma3_wide", ["RotatingKVCache", "RotatingKVCache", "QuantizedKVCache"]),
        ("qwen3_next_wide", ["ArraysCache", "QuantizedKVCache", "ArraysCache"]),
    ],
)
def test_layers_that_hold_every_position_are_quantised(networks, family, expected):
    fresh_caches = factory(networks(family), kv_bits=4)
    assert kinds(fresh_caches()) == expected
    assert {getattr(cache, "bits", 4) for cache in fresh_caches()} == {4}
    assert kinds(factory(networks(family))()) != expected


@pytest.mark.parametrize(("largest", "size"), [(128, 64), (64, 64), (32, 32)])
def test_groups_divide_the_heads_and_are_no_larger_than_asked(networks, largest, size):
    fresh_caches = factory(networks("llama_wide"), kv_bits=8, kv_group_size=largest)
    assert {cache.group_size for cache in fresh_caches()} == {size}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "mamba2"])
def test_heads_that_no_group_divides_stay_as_they_are(networks, family, caplog):
    fresh_caches = factory(networks(family), kv_bits=8)
    assert "QuantizedKVCache" not in kinds(fresh_caches())
    assert "not quantised: no layer has keys and values" in caplog.text


class Listed:
    """A network that keeps the caches of its two layers in a list."""

    def __init__(self, network):
        self._network = network

    def make_cache(self):
        return [CacheList(KVCache(), KVCache())]

    def __call__(self, inputs, cache):
        return self._network(inputs, cache=list(cache[0].caches))


def test_caches_in_a_list_are_quantised(networks):
    [listed] = factory(Listed(networks("llama_wide")), kv_bits=8)()
    assert type(listed) is CacheList
    assert kinds(listed.caches) == ["QuantizedKVCache"] * 2


class Refusing(Listed):
    """A network that cannot read quantised caches."""

    def __call__(self, inputs, cache):
        if type(cache[0].caches[0]) is QuantizedKVCache:
            raise ValueError("what is this?")
        return super().__call__(inputs, cache)


class Confused(Listed):
    """A network that reads them wrongly."""

    def __call__(self, inputs, cache):
        logits = super().__call__(inputs, cache)
        return logits * mx.nan if type(cache[0].caches[0]) is QuantizedKVCache else logits


@pytest.mark.parametrize(
    ("network", "reason"),
    [(Refusing, "raises ValueError: what is this?"), (Confused, "logits are not finite")],
)
def test_a_network_that_cannot_read_quantised_caches_keeps_its_own(
    networks, network, reason, caplog
):
    [listed] = factory(network(networks("llama_wide")), kv_bits=8)()
    assert kinds(listed.caches) == ["KVCache"] * 2
    assert reason in caplog.text


def test_a_model_with_sinks_keeps_its_own(caplog):
    """Upstream contract: quantised attention has no sinks in mlx-lm 0.32."""
    from mlx_lm.models import gpt_oss

    args = {"num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    shape = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 32, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 24}
    network = gpt_oss.Model(gpt_oss.ModelArgs(**args, **shape, **heads))
    assert kinds(factory(network, kv_bits=8)()) == kinds(CacheFactory(network)())
    assert "attention sinks" in caplog.text


@pytest.mark.parametrize("family", WIDE)
def test_quantised_rows_keep_their_own_lengths_in_a_batch(networks, family):
    network = networks(family)
    plan = batch_plan(network, factory(network, kv_bits=8), range(VOCAB))
    assert plan.batching is Batching.RAGGED


class Flipping:
    """Computes other logits in a batch of quantised rows, as a value at the edge of a code does."""

    def __init__(self, network, by):
        self.network, self.by = network, by

    def __getattr__(self, name):
        return getattr(self.network, name)

    def __call__(self, inputs, cache):
        logits = self.network(inputs, cache=cache)
        is_quantised = any(isinstance(layer, QuantizedKV) for layer in cache)
        return logits + mx.where(mx.arange(VOCAB) == 0, self.by, 0) if is_quantised else logits


@pytest.mark.parametrize(("share", "batching"), [(0.5, Batching.RAGGED), (20, Batching.NONE)])
def test_a_batch_may_differ_by_what_quantising_changes_and_by_no_more(networks, share, batching):
    """SmolLM2 differs by 0.05 with 8 bits, which themselves change 0.5: it ran one at a time."""
    network = networks("llama_wide")
    tokens = mx.array([prompt_of(60)])
    logits = [network(tokens, cache=factory(network, **o)()) for o in ({}, {"kv_bits": 4})]
    one, other = (each - mx.logsumexp(each, axis=-1, keepdims=True) for each in logits)
    network = Flipping(network, share * mx.abs(one - other).max().item())
    assert share > 1 or network.by > 1.1e-2  # more than rounding may do
    plan = batch_plan(network, factory(network, kv_bits=4), prompt_of(60), (24, 60))
    assert plan.batching is batching


def test_quantised_rows_give_tokens_back(networks):
    network = networks("llama_wide")
    trial = WholeTrial(network, factory(network, kv_bits=8), range(VOCAB))
    assert trial.fault(BatchPlan(), width=3) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", WIDE)
@pytest.mark.one_in(2)
def test_quantised_rows_draw_the_same_tokens_in_a_batch_as_alone(networks, family, bits):
    requests = [
        make_request(f"r{i}", prompt_of(4 + 23 * i, i), max_tokens=4 + 3 * i) for i in range(5)
    ]
    together = Driver(networks(family), kv_bits=bits).run(*requests)
    options = {"batches": False, "max_cache_bytes": 0}
    alone = Driver(networks(family), kv_bits=bits, **options).run(*requests)
    assert [outcome.token_ids for outcome in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize("family", CUTTABLE)
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.one_in(2)
def test_a_prefix_kept_in_8_bits_goes_on_with_the_tokens_of_a_cold_prompt(networks, family, name):
    request = make_request("second", PROMPTS[name], top_logprobs=5)
    [cold] = Driver(networks(family), max_cache_bytes=0).run(request)
    driver = Driver(networks(family), cache_bits=8)
    driver.run(make_request("first", BASE, max_tokens=3))
    [warm] = driver.run(request)
    assert warm.cached_tokens >= 89
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("family", CUTTABLE)
@pytest.mark.parametrize(("bits", "share", "bound"), [(8, 0.33, 0.2), (4, 0.2, 1.0)])
def test_a_prefix_in_fewer_bits_is_smaller_and_near(networks, family, bits, share, bound):
    request = make_request("again", BASE, top_logprobs=20)
    kept, full = Driver(networks(family), cache_bits=bits), Driver(networks(family))
    [cold] = full.run(request)
    kept.run(make_request("first", BASE, max_tokens=12))
    [warm] = kept.run(request)
    assert warm.cached_tokens == 149
    assert _bytes(kept) < share * _bytes(full)
    near = dict(warm.logprobs[0].top)
    assert all(abs(near[token] - logprob) < bound for token, logprob in cold.logprobs[0].top[:3])


def _bytes(driver):
    return driver.loop.status().memory_bytes["prompt_cache"]


def test_rows_of_a_batch_share_a_prefix_that_is_kept_in_fewer_bits(networks):
    requests = [make_request(f"r{i}", [*BASE, *prompt_of(20 + i, salt=i)]) for i in range(4)]
    driver = Driver(networks("llama_wide"), cache_bits=8)
    warm = driver.run(*requests)
    assert sum(outcome.cached_tokens for outcome in warm) >= 3 * len(BASE)
    cold = Driver(networks("llama_wide"), max_cache_bytes=0).run(*requests)
    assert [outcome.token_ids for outcome in warm] == [outcome.token_ids for outcome in cold]
