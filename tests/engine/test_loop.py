import itertools
import random
import time
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from engine_driver import VOCAB, Driver, make_request, prompt_of
from engine_events import events_in
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from backend.core.engine_status import RequestPhase
from backend.core.request import SamplingParams
from backend.core.step import FinishReason, PrefillDone
from backend.engine import loop
from backend.engine.loop import IDLE_TIMEOUT_S, LEAST_CLEARED_BYTES
from backend.engine.messages.protocol import Submit
from backend.engine.prefix_store import PrefixStore
from backend.engine.rows.row import Row
from backend.errors import GenerationFailedError
from backend.model.device import DEVICE
from scripts.tiny_models import FAMILIES

pytestmark = pytest.mark.mlx

BATCHED_FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"]


def reference(network, token_ids, count):
    """Return the greedy tokens of mlx-lm."""
    steps = generate_step(mx.array(token_ids), network, max_tokens=count)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", [*BATCHED_FAMILIES, "qwen3_moe", "qwen3_5", "mamba2"])
@pytest.mark.one_in(3)
def test_one_request_gives_the_tokens_of_mlx_lm(networks, family):
    network = networks(family)
    prompt = prompt_of(70)
    outcome = Driver(network).run(make_request("a", prompt))[0]
    assert outcome.token_ids == reference(network, prompt, 12)
    assert outcome.finish is FinishReason.LENGTH


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.one_in(4)
def test_requests_that_join_and_leave_at_any_step_give_the_tokens_of_mlx_lm(networks, family):
    network = networks(family)
    rng = random.Random(5)
    driver = Driver(network, prefill_chunk=16)
    requests = [
        make_request(f"r{i}", prompt_of(rng.randint(1, 60), i), max_tokens=rng.randint(1, 14))
        for i in range(12)
    ]
    for request in requests:
        driver.loop.requests.submit(request)
        for _ in range(rng.randint(0, 4)):
            driver.turn()
    driver.run()
    for request in requests:
        outcome = driver.outcomes[request.request_id]
        prompt = request.prompt.token_ids
        assert outcome.token_ids == reference(network, prompt, request.max_tokens)


def test_a_model_that_cannot_be_batched_serves_one_after_another(networks):
    network = networks("llama")
    requests = [make_request(f"r{i}", prompt_of(9 + i, i), max_tokens=5) for i in range(3)]
    outcomes = Driver(network, batches=False).run(*requests)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.token_ids == reference(network, request.prompt.token_ids, 5)


def test_a_seeded_request_draws_the_same_alone_and_beside_seven_others(networks):
    network = networks("llama")
    seeded = make_request(
        "seeded", prompt_of(20), sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=42)
    )
    others = [
        make_request(
            f"o{i}", prompt_of(5 + 9 * i, i), sampling=SamplingParams(temperature=0.8, seed=i)
        )
        for i in range(7)
    ]
    alone = Driver(network).run(seeded)[0]
    beside = Driver(network).run(*others[:3], seeded, *others[3:])[3]
    assert alone.token_ids == beside.token_ids
    other_seed = replace(
        seeded, params=replace(seeded.params, sampling=replace(seeded.params.sampling, seed=43))
    )
    assert Driver(network).run(other_seed)[0].token_ids != alone.token_ids


def test_penalties_are_the_same_alone_and_in_a_batch(networks):
    network = networks("llama")
    sampling = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, penalty_window=9)
    penalised = make_request("p", prompt_of(30), sampling=sampling, max_tokens=24)
    plain = [make_request(f"o{i}", prompt_of(8, i), max_tokens=4 * i + 2) for i in range(4)]
    alone = Driver(network).run(penalised)[0]
    assert Driver(network).run(*plain, penalised)[4].token_ids == alone.token_ids
    assert alone.token_ids != reference(network, prompt_of(30), 24)


def test_a_stop_token_ends_the_request_and_frees_its_slot(networks):
    network = networks("llama")
    expected = reference(network, prompt_of(10), 12)
    driver = Driver(network)
    outcome = driver.run(make_request("a", prompt_of(10), stop=[expected[3]]))[0]
    stop_at = expected.index(expected[3])
    assert outcome.token_ids == expected[: stop_at + 1]
    assert outcome.finish is FinishReason.STOP
    assert driver.loop.status().metrics["slots_taken"] == 0


def test_the_stop_token_wins_over_the_limit(networks):
    network = networks("llama")
    first = reference(network, prompt_of(10), 1)[0]
    outcome = Driver(network).run(make_request("a", prompt_of(10), stop=[first], max_tokens=1))[0]
    assert outcome.finish is FinishReason.STOP


def test_logprobs_are_those_of_the_models_own_distribution(networks):
    network = networks("llama")
    sampling = SamplingParams(temperature=1.5, presence_penalty=1.0, seed=3)
    request = make_request("a", prompt_of(10), sampling=sampling, top_logprobs=5)
    outcome = Driver(network).run(make_request("plain", prompt_of(7)), request)[1]
    sequence = [*request.prompt.token_ids, *outcome.token_ids]
    logits = np.array(network(mx.array([sequence]), cache=make_prompt_cache(network))[0])
    for i, (token, got) in enumerate(zip(outcome.token_ids, outcome.logprobs, strict=True)):
        row = logits[len(request.prompt.token_ids) - 1 + i].astype(np.float64)
        expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert got.logprob == pytest.approx(expected[token], abs=1e-4)
        assert [t for t, _ in got.top] == np.argsort(-expected, kind="stable")[:5].tolist()
        assert [x for _, x in got.top] == sorted((x for _, x in got.top), reverse=True)


def test_logprobs_are_computed_only_for_those_who_asked(networks):
    requests = [make_request("a", prompt_of(5)), make_request("b", prompt_of(6), top_logprobs=0)]
    silent, asking = Driver(networks("llama")).run(*requests)
    assert silent.logprobs == [None] * 12
    assert all(entry.top == () for entry in asking.logprobs)


def test_a_cancel_takes_effect_before_the_next_chunk(networks):
    driver = Driver(networks("llama"), prefill_chunk_alone=16)
    driver.loop.requests.submit(make_request("long", prompt_of(400)))
    driver.turn()
    assert driver.loop.status().memory_bytes["kv_active"] > 0
    driver.loop.requests.cancel("long")
    status = driver.loop.status()
    assert (status.metrics["slots_taken"], status.memory_bytes["kv_active"]) == (0, 0)
    assert driver.loop.is_idle
    driver.loop.check()


def test_a_cancel_while_decoding_leaves_the_neighbours_alone(networks):
    network = networks("llama")
    driver = Driver(network)
    for name in ("a", "b", "c"):
        driver.loop.requests.submit(make_request(name, prompt_of(10, ord(name)), max_tokens=20))
    for _ in range(8):
        driver.turn()
    driver.loop.requests.cancel("b")
    driver.run()
    for name in ("a", "c"):
        assert driver.outcomes[name].token_ids == reference(network, prompt_of(10, ord(name)), 20)
    assert len(driver.outcomes["b"].token_ids) < 20
    assert driver.outcomes["b"].finish is None


def test_cancelling_what_has_ended_or_never_was_is_harmless(networks):
    driver = Driver(networks("llama"))
    driver.run(make_request("a", prompt_of(3), max_tokens=2))
    driver.loop.requests.cancel("a")
    driver.loop.requests.cancel("unknown")
    driver.loop.check()
    assert driver.loop.is_idle


class PoisonedNetwork:
    """Raises whenever a batch of more than one token position holds the poison."""

    POISON = VOCAB - 1

    def __init__(self, network):
        self._network = network
        self.layers = network.layers

    def __call__(self, inputs, cache):
        if (inputs == self.POISON).any().item():
            raise ValueError("poison")
        return self._network(inputs, cache=cache)


def test_a_request_that_breaks_a_step_fails_alone(networks):
    network = networks("llama")
    bias = SamplingParams(logit_bias={PoisonedNetwork.POISON: 1000.0})
    driver = Driver(PoisonedNetwork(network))
    good = [make_request(f"g{i}", prompt_of(10 + i, i), max_tokens=16) for i in range(3)]
    for request in good:
        driver.loop.requests.submit(request)
    for _ in range(6):
        driver.turn()
    outcomes = driver.run(make_request("bad", prompt_of(5), sampling=bias))
    assert isinstance(outcomes[0].error, GenerationFailedError)
    assert "poison" in str(outcomes[0].error)
    for request in good:
        outcome = driver.outcomes[request.request_id]
        assert outcome.token_ids == reference(network, request.prompt.token_ids, 16)
        assert outcome.finish is FinishReason.LENGTH


def test_a_request_that_breaks_its_prefill_fails_alone(networks):
    network = networks("llama")
    poisoned = make_request("bad", [1, 2, PoisonedNetwork.POISON, 3, 4])
    good = make_request("good", prompt_of(10))
    bad, fine = Driver(PoisonedNetwork(network)).run(poisoned, good)
    assert isinstance(bad.error, GenerationFailedError)
    assert fine.token_ids == reference(network, prompt_of(10), 12)


class UnbatchableNetwork(PoisonedNetwork):
    """Raises whenever it is given more than one row."""

    def __call__(self, inputs, cache):
        if inputs.shape[0] > 1:
            raise RuntimeError("cannot do batches")
        return self._network(inputs, cache=cache)


def test_a_model_whose_batches_keep_failing_goes_on_one_row_at_a_time(networks, caplog):
    network = networks("llama")
    requests = [make_request(f"r{i}", prompt_of(6, i), max_tokens=10) for i in range(3)]
    outcomes = Driver(UnbatchableNetwork(network)).run(*requests)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.token_ids == reference(network, request.prompt.token_ids, 10)
    assert "one request at a time" in caplog.text


class FlakyNetwork(PoisonedNetwork):
    """Raises on every eighth batch, whatever is in it."""

    def __init__(self, network):
        super().__init__(network)
        self.batches = 0

    def __call__(self, inputs, cache):
        if inputs.shape[0] > 1:
            self.batches += 1
            if self.batches % 8 == 0:
                raise RuntimeError("not this time")
        return self._network(inputs, cache=cache)


def test_failures_that_working_batches_lie_between_cost_no_batching(networks, caplog):
    network = networks("llama")
    flaky = FlakyNetwork(network)
    requests = [make_request(f"r{i}", prompt_of(6, i), max_tokens=40) for i in range(3)]
    outcomes = Driver(flaky).run(*requests)
    assert flaky.batches > 4 * 8
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.token_ids == reference(network, request.prompt.token_ids, 40)
    assert "one request at a time" not in caplog.text


def test_a_short_request_overtakes_a_long_prefill(networks):
    driver = Driver(networks("llama"), prefill_chunk_alone=16, prefill_chunk=16, prefill_pause_ms=1)
    driver.loop.requests.submit(make_request("long", prompt_of(600), max_tokens=1))
    driver.turn()
    driver.loop.requests.submit(make_request("short", prompt_of(8), max_tokens=2))
    while "short" not in driver.outcomes or driver.outcomes["short"].finish is None:
        driver.turn()
    assert "long" not in driver.outcomes
    driver.run()
    assert driver.outcomes["long"].finish is FinishReason.LENGTH


def test_prefill_done_is_published_once_before_the_first_token(networks):
    driver = Driver(networks("llama"), prefill_chunk_alone=16)
    driver.loop.requests.submit(make_request("a", prompt_of(40), max_tokens=3))
    while not driver.loop.is_idle:
        driver.loop.turn()
    events = [event for told in driver.desk.published for _, event in events_in(told)]
    assert [isinstance(e, PrefillDone) for e in events] == [True, False, False, False]
    assert events[0].prefill_ms > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_one_token_prompts_work_alone_and_in_a_batch(networks, family):
    network = networks(family)
    requests = [make_request("a", [5]), make_request("b", [6]), make_request("c", prompt_of(9))]
    for count in (1, 2, 3):
        outcomes = Driver(network).run(*requests[:count])
        for request, outcome in zip(requests, outcomes, strict=False):
            assert outcome.token_ids == reference(network, request.prompt.token_ids, 12)


def test_every_vocabulary_id_may_be_biased(networks):
    bias = SamplingParams(logit_bias={VOCAB - 1: 1000.0})
    outcome = Driver(networks("llama")).run(make_request("a", prompt_of(4), sampling=bias))[0]
    assert set(outcome.token_ids) == {VOCAB - 1}


def turns_that_clear(driver):
    """Return the turns of a long reply after which MLX holds no free buffers, and their number."""
    mx.clear_cache()
    driver.loop.requests.submit(make_request("a", prompt_of(5), max_tokens=150))
    held = []
    while not driver.loop.is_idle:
        driver.turn()
        held.append(mx.get_cache_memory())
    assert max(held) < LEAST_CLEARED_BYTES
    return [turn for turn, count in enumerate(held) if count == 0], len(held)


def assert_rhythm(emptied, turns):
    assert len(emptied) >= 3
    assert max(b - a for a, b in itertools.pairwise(emptied)) <= DEVICE.turns_per_clear
    assert len(emptied) < turns / 2


def test_freed_buffers_are_given_back_at_a_fixed_rhythm(networks, monkeypatch):
    monkeypatch.setattr(loop, "LEAST_CLEARED_BYTES", 1)
    assert_rhythm(*turns_that_clear(Driver(networks("llama"))))


def test_no_step_waits_for_a_few_freed_buffers_but_those_of_ranks(networks):
    emptied, turns = turns_that_clear(Driver(networks("llama")))
    assert not [turn for turn in emptied if DEVICE.turns_per_clear // 2 < turn < turns - 1]
    assert_rhythm(*turns_that_clear(Driver(networks("llama"), is_replicated=True)))


def test_what_ended_work_has_freed_is_given_back_in_a_rest(networks):
    driver = Driver(networks("llama"))
    driver.run(make_request("a", prompt_of(300), max_tokens=4))
    driver.turn()
    assert mx.get_cache_memory() > 0
    assert driver.loop.idle_timeout_s == IDLE_TIMEOUT_S
    driver.loop.active_at -= IDLE_TIMEOUT_S
    driver.turn()
    assert mx.get_cache_memory() == 0
    assert driver.loop.idle_timeout_s is None


def test_a_request_that_cannot_be_taken_in_fails_alone(networks, monkeypatch):
    network = networks("llama")
    driver = Driver(network)
    good, bad = make_request("good", prompt_of(10)), make_request("bad", prompt_of(200))
    driver.loop.requests.submit(good)
    driver.turn()

    def refuse(_keeper, _row):
        raise RuntimeError("no way to the disk")

    monkeypatch.setattr(PrefixStore, "fetch", refuse)
    driver.turn(Submit(bad))
    driver.run()
    assert "no way to the disk" in str(driver.outcome(bad).error)
    assert driver.outcome(good).token_ids == reference(network, prompt_of(10), 12)


@pytest.mark.parametrize("failing", range(1, 7))
@pytest.mark.one_in(2)
def test_books_that_fail_cost_no_request_a_token_or_its_end(networks, monkeypatch, failing):
    network = networks("llama")
    driver = Driver(network)
    calls = itertools.count(1)

    def leave_room(_keeper, _nbytes):
        if next(calls) == failing:
            raise RuntimeError("no memory to copy what gives way")

    monkeypatch.setattr(PrefixStore, "leave_room", leave_room)
    requests = [make_request(f"r{i}", prompt_of(20 + i, i), max_tokens=6) for i in range(3)]
    outcomes = driver.run(*requests)
    assert next(calls) > failing
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.token_ids == reference(network, request.prompt.token_ids, 6)
        assert outcome.finish is FinishReason.LENGTH
    assert driver.loop.status().requests == ()


def test_a_prompt_whose_path_cannot_be_held_tells_no_wrong_time(networks, monkeypatch):
    driver, started = Driver(networks("llama")), time.monotonic()

    def claim(_keeper, _row):
        raise RuntimeError("no path")

    monkeypatch.setattr(PrefixStore, "claim", claim)
    driver.loop.requests.submit(make_request("a", prompt_of(20)))
    while not driver.desk.published:
        driver.loop.turn()
    [done] = filter(None, (told.steps["a"].prefill for told in driver.desk.published))
    assert done.prefill_ms < 1000.0 * (time.monotonic() - started)


def test_the_rate_of_a_resumed_row_leaves_out_what_another_process_drew():
    row = Row.resumed(make_request("a", prompt_of(5), max_tokens=200), range(100))
    row.take(7)
    assert row.status(RequestPhase.ACTIVE).generated_tokens == 101
    assert row.status(RequestPhase.ACTIVE).tokens_per_s == 0.0


def test_what_disagrees_when_the_loop_falls_idle_ends_the_process(networks):
    driver = Driver(networks("llama"))
    driver.loop.requests.submit(make_request("a", prompt_of(5), max_tokens=2))
    driver.loop.scheduler.fetching.append(Row(make_request("stray", prompt_of(5))))

    def run_until_idle():
        while True:
            driver.loop.turn()
            if driver.loop.is_idle:
                return

    with pytest.raises(AssertionError, match="no open request"):
        run_until_idle()
