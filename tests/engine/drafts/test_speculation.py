"""Drafted tokens change no reply: tokens, log-probabilities and ends are those without drafts."""

import pytest
from drafting import (
    CROWDS,
    FEW,
    FREE,
    Cycle,
    assert_same,
    requests_of,
    requests_of_one_prefix,
    require_same_as_they_come_and_go,
)
from engine_driver import VOCAB, Driver, make_request, prompt_of, room_for
from whole_trial import batch_plan
from wrapped_network import CountingNetwork, WrappedNetwork

from backend.config import SpeculationOptions, TuningOptions
from backend.core.request import SamplingParams
from backend.core.step import FinishReason
from backend.engine.drafts.drafting import Drafting
from backend.engine.drafts.pricing import PassCosts
from backend.engine.passes.caches import make_cache_factory
from backend.engine.plan import Batching
from backend.engine.rows.pacing import Counters
from backend.engine.rows.row import Row
from backend.model.checkpoint.upstream import import_mlx_lm

pytestmark = pytest.mark.mlx

FAMILIES = [
    *("llama", "llama_sliding", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3"),
    *("qwen3_next", "qwen3_5", "mamba2", "granitemoehybrid", "kimi_linear"),
]


def repeating(name, **options):
    sampling = SamplingParams(logit_bias=FEW)
    return make_request(name, prompt_of(20), sampling=sampling, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "seeds"), CROWDS)
@pytest.mark.one_in(4)
def test_a_reply_is_the_same_with_drafts_and_without(networks, family, rows, seeds):
    network = networks(family)
    accepted = 0
    for seed in seeds:
        requests = requests_of(seed, rows)
        expected = Driver(network).run(*requests)
        driver = Driver(network, pass_seconds=FREE)
        assert_same(driver.run(*requests), expected)
        accepted += driver.loop.status().metrics["accepted_tokens"]
    assert accepted > 10


@pytest.mark.parametrize("kv_bits", [4, 8])
def test_it_is_the_same_with_quantised_kv(networks, kv_bits):
    network = networks("llama_wide")
    requests = requests_of(1, 4)
    expected = Driver(network, kv_bits=kv_bits, kv_group_size=32).run(*requests)
    driver = Driver(network, kv_bits=kv_bits, kv_group_size=32, pass_seconds=FREE)
    assert_same(driver.run(*requests), expected)
    assert driver.loop.status().metrics["accepted_tokens"] > 20


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
@pytest.mark.one_in(2)
def test_it_is_the_same_behind_prefixes_and_while_rows_come_go_and_pause(networks, family, caplog):
    network, requests = networks(family), requests_of_one_prefix(3, 10, 20)
    expected = {r.request_id: Driver(network).run(r)[0].token_ids for r in requests}
    budget = room_for(network, 60, rows=4)
    driver = Driver(network, pass_seconds=FREE, max_kv_bytes=budget, expected_tokens=1)
    require_same_as_they_come_and_go(driver, requests, expected)
    assert "pauses at" in caplog.text
    assert driver.loop.status().metrics["accepted_tokens"] > 30


def test_a_reply_ends_within_a_draft_where_it_ends_without(networks):
    network = networks("llama")
    whole = Driver(network).run(repeating("a", max_tokens=30))[0].token_ids
    for limit in range(1, 24):
        driver = Driver(network, pass_seconds=FREE)
        outcome = driver.run(repeating("a", max_tokens=limit))[0]
        assert outcome.token_ids == whole[:limit]
        assert outcome.finish is FinishReason.LENGTH
    stop = whole[20]
    outcome = Driver(network, pass_seconds=FREE).run(repeating("a", max_tokens=30, stop=[stop]))[0]
    assert outcome.token_ids == whole[: whole.index(stop) + 1]
    assert outcome.finish is FinishReason.STOP


def test_rows_without_drafts_are_not_padded_to_those_with_drafts(networks):
    class Shapes(WrappedNetwork):
        seen = ()

        def __call__(self, inputs, cache):
            self.seen = (*self.seen, inputs.shape)
            return super().__call__(inputs, cache)

    network = Shapes(networks("llama"))
    others = [make_request(f"r{n}", prompt_of(9, n), max_tokens=40) for n in range(3)]
    Driver(network, pass_seconds=FREE).run(repeating("a", max_tokens=40), *others)
    drafted = [shape for shape in network.seen if shape[0] > 4]
    assert drafted
    assert all(tokens < 4 * 9 and width == 1 for tokens, width in drafted)


def test_passes_are_fewer_when_drafts_come_true(networks):
    plain, drafted = CountingNetwork(networks("llama")), CountingNetwork(networks("llama"))
    Driver(plain).run(repeating("a", max_tokens=200))
    Driver(drafted, pass_seconds=FREE).run(repeating("a", max_tokens=200))
    assert drafted.passes < plain.passes / 3


@pytest.mark.parametrize(
    ("seconds", "depth"),
    [({1: 1.0, 8: 1.0}, 8), ({1: 1.0, 2: 1.1, 3: 9.0, 8: 99.0}, 1), ({1: 1.0, 8: 200.0}, 0)],
)
def test_a_pass_takes_as_many_drafts_as_pay(seconds, depth):
    options = SpeculationOptions(max_draft_tokens=8)
    drafting = Drafting(PassCosts(seconds), Counters(), VOCAB, options)
    row = Row(make_request("a", [1, 2, 3, 4, 5, 6, 7, 8] * 4, max_tokens=50))
    row.take(1)
    row.drawn = 1
    row.fed = 32
    drafting.follow([row])
    drafting.observe(1, 1, seconds[1])
    assert drafting.may_draft
    assert drafting.drafts() == [(2, 3, 4, 5, 6, 7, 8, 1)[:depth]]


def test_a_pass_without_drafts_comes_first_where_its_cost_is_not_known():
    drafting = Drafting(PassCosts(FREE), Counters(), VOCAB, SpeculationOptions())
    batch = [Row(make_request(f"r{n}", [*range(2, 30)] * 2, max_tokens=50)) for n in range(2)]
    for row in batch:
        row.take(2)
        row.drawn, row.fed = 1, 56
    drafting.follow(batch)
    assert not drafting.may_draft
    assert drafting.drafts() == [(), ()]
    drafting.observe(2, 2, 1.0)
    assert drafting.may_draft
    assert all(drafting.drafts())


def test_a_text_that_foretells_wrong_tokens_is_soon_no_reason_to_wait():
    drafting = Drafting(PassCosts(FREE), Counters(), VOCAB, SpeculationOptions())
    row = Row(make_request("a", [1, 2, 3] * 9, max_tokens=90))
    drafting.follow([row])
    drafting.observe(1, 1, FREE[1])
    waits = 0
    for other in (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15):
        for token in (1, 2, 3, other):
            row.take(token)
            row.drawn += 1
            row.fed = len(row.token_ids) - 1
            if token == 3:
                waits += drafting.may_draft
            elif token == other:
                drafting.drafts()
    assert 0 < waits < 8


@pytest.mark.parametrize(("rows", "depth"), [(8, 15), (40, 2), (100, 0)])
def test_a_pass_is_bounded_however_many_rows_have_drafts(rows, depth):
    drafting = Drafting(PassCosts(FREE), Counters(), VOCAB, SpeculationOptions())
    drafting.observe(rows, rows, FREE[1])
    batch = [Row(make_request(f"r{n}", [*range(2, 30)] * 2, max_tokens=50)) for n in range(rows)]
    for row in batch:
        row.take(2)
        row.drawn, row.fed = 1, 56
    drafting.follow(batch)
    assert {len(draft) for draft in drafting.drafts()} == {depth}


def test_a_request_may_do_without(networks):
    driver = Driver(networks("llama"), pass_seconds=FREE)
    driver.run(repeating("a", max_tokens=60, may_speculate=False))
    assert driver.loop.status().metrics["drafted_tokens"] == 0


def test_lookup_alone_is_a_choice(networks):
    driver = Driver(networks("llama"), pass_seconds=FREE, speculation="lookup")
    driver.run(repeating("a", max_tokens=60))
    assert driver.loop.status().metrics["accepted_tokens"] > 10


def test_what_a_grammar_forces_takes_few_passes(networks):
    network = CountingNetwork(networks("llama"))
    request = make_request(
        "a", prompt_of(20), max_tokens=90, grammar=Cycle(range(10, 30), 64), stop=[1]
    )
    free = make_request("b", prompt_of(9, 1), max_tokens=12)
    alone = Driver(networks("llama")).run(free)[0]
    outcome, other = Driver(network, pass_seconds=FREE).run(request, free)
    assert outcome.token_ids == [*(10 + n % 20 for n in range(64)), 1]
    assert outcome.finish is FinishReason.STOP
    assert other.token_ids == alone.token_ids
    assert network.passes < 25


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_the_look_at_load_finds_that_a_family_takes_drafts(networks, family):
    network = networks(family)
    fresh_caches = make_cache_factory(network, TuningOptions())
    plan = batch_plan(network, fresh_caches, range(2, VOCAB), drafts=True)
    assert plan.batching is not Batching.NONE
    assert plan.pass_seconds[1] > 0


def test_a_family_whose_padding_gets_into_its_state_takes_none(tiny_models, caplog):
    caplog.set_level("INFO")
    # Without our mend, by which none of the families does it.
    network, _ = import_mlx_lm().load_model(tiny_models("nemotron_h"))
    fresh_caches = make_cache_factory(network, TuningOptions())
    plan = batch_plan(network, fresh_caches, range(2, VOCAB), drafts=True)
    assert not plan.pass_seconds
    assert "nothing is drafted for this model: log-probabilities differ" in caplog.text
