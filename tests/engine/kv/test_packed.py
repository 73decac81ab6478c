"""Passes whose rows take unlike numbers of tokens."""

import mlx.core as mx
import pytest
from whole_trial import batch_plan
from wrapped_network import WrappedNetwork

from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Batching, BatchPlan
from backend.engine.trials.trial_steps import SHORT_PROMPTS

pytestmark = pytest.mark.mlx

TOKENS = [(7 * i * i + 3 * i) % 94 for i in range(60)]
# Tokens of each row before the pass, and in it.
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33])
INPUTS = ([1, 2, 3, 4, 5], [6], [7, 8])


class Counting(WrappedNetwork):
    """Counts the tokens that it computes."""

    def __init__(self, network):
        super().__init__(network)
        self.tokens = 0

    def __call__(self, inputs, cache):
        self.tokens += inputs.size
        return super().__call__(inputs, cache)


def alone(network, prompt, tokens):
    """Return the logits [T, V] of a row's tokens, each in a pass of its own."""
    caches = CacheFactory(network)()
    network(mx.array([prompt]), cache=caches)
    return mx.concatenate([network(mx.array([[t]]), cache=caches)[0] for t in tokens])


def batch_of(network, batching, *, packs):
    rows = []
    for prompt in PROMPTS:
        rows.append(CacheFactory(network)())
        network(mx.array([prompt]), cache=rows[-1])
    caches = BatchCaches(BatchPlan(batching, packs=packs))
    caches.regroup([], rows)
    return caches


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("family", "batching", "can_pack"),
    [
        ("llama", Batching.RAGGED, True),
        ("llama_sliding", Batching.RAGGED, False),
        ("qwen3_moe", Batching.RAGGED, True),
        ("gpt_oss", Batching.RAGGED, False),
        ("deepseek_v3", Batching.LATENT, True),
        ("qwen3_next", Batching.RAGGED, False),
        ("llama", Batching.PADDED, False),
    ],
)
def test_rows_get_the_logits_that_they_get_alone_and_pay_for_no_padding_if_they_can_be_packed(
    networks, family, batching, can_pack, packs
):
    network = Counting(networks(family))
    caches = batch_of(network, batching, packs=packs)
    network.tokens = 0
    logits = caches.take(network, INPUTS)
    computed = caches.computed(list(map(len, INPUTS)))
    assert network.tokens == computed == (8 if packs and can_pack else 15)
    first = 0
    for prompt, tokens in zip(PROMPTS, INPUTS, strict=True):
        expected = alone(networks(family), prompt, tokens)
        assert mx.allclose(logits[first : first + len(tokens)], expected, atol=1e-4)
        first += len(tokens)


def test_rows_that_take_as_many_tokens_need_no_packing(networks):
    network = Counting(networks("llama"))
    caches = batch_of(network, Batching.RAGGED, packs=True)
    hidden = mx.zeros((3, 2, 4))
    caches.take(network, [[1, 2]] * 3)
    assert caches.by_row(hidden) is hidden


def test_what_a_module_returns_for_a_packed_pass_can_be_read_by_row(networks):
    network = networks("llama")
    caches = batch_of(network, Batching.RAGGED, packs=True)
    caches.take(network, INPUTS)
    found = caches.by_row(mx.arange(8)[:, None, None])
    assert found[..., 0].tolist() == [[0, 1, 2, 3, 4], [5, 5, 5, 5, 5], [6, 7, 7, 7, 7]]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_look_at_load_finds_that_rows_can_be_packed(networks, family):
    plan = batch_plan(networks(family), CacheFactory(networks(family)), TOKENS, drafts=True)
    assert plan.packs
    assert plan.pass_seconds


def test_a_model_that_cannot_be_packed_drafts_all_the_same(networks):
    class Crowded(WrappedNetwork):
        """Computes something else for more rows than there are."""

        def __call__(self, inputs, cache):
            return super().__call__(inputs, cache) * (1 + (len(inputs) > len(SHORT_PROMPTS)))

    plan = batch_plan(
        Crowded(networks("llama")), CacheFactory(networks("llama")), TOKENS, drafts=True
    )
    assert plan.batching is Batching.RAGGED
    assert plan.pass_seconds
    assert not plan.packs
