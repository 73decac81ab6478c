"""Models whose requests need more memory than there is: nothing fails, and no token changes."""

import logging
import random

import pytest
from engine_driver import Driver, make_request, prompt_of, room_for
from wrapped_network import WrappedNetwork

from backend.core.engine_status import RequestPhase
from backend.core.request import Priority, SamplingParams
from backend.core.step import FinishReason
from backend.errors import OverloadedError

pytestmark = pytest.mark.mlx

EXPECTED = 32
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.0, seed=7)
PAUSES = [
    *((family, GREEDY) for family in ("llama", "gpt_oss", "qwen3_next", "deepseek_v3")),
    *((family, SEEDED) for family in ("llama", "gemma3_text", "qwen3_5")),
]


def limited_driver(network, **tuning):
    """Return a driver that expects few tokens of requests without a limit of their own."""
    return Driver(network, expected_tokens=EXPECTED, **tuning)


def open_requests(count, *, max_tokens=EXPECTED + 60, **options):
    """Requests without a limit of their own, each with another prompt."""
    return [
        make_request(
            f"r{i}",
            prompt_of(40 + 9 * i, i),
            max_tokens=max_tokens,
            is_open_ended=True,
            **options,
        )
        for i in range(count)
    ]


def run_watched(driver, requests):
    """Run to the end; return the outcomes and the most that running rows took and reserved."""
    for request in requests:
        driver.loop.requests.submit(request)
    taken = reserved = 0
    while not driver.loop.is_idle:
        driver.turn()
        memory = driver.loop.status().memory_bytes
        taken = max(taken, memory["kv_active"])
        reserved = max(reserved, memory["kv_reserved"] + memory["prompt_cache"])
    return [driver.outcomes[request.request_id] for request in requests], taken, reserved


@pytest.mark.parametrize(("family", "sampling"), PAUSES)
@pytest.mark.one_in(3)
def test_a_request_that_pauses_goes_on_with_the_same_tokens(networks, family, sampling, caplog):
    network = networks(family)
    requests = open_requests(3, sampling=sampling)
    free = Driver(network).run(*requests)
    budget = room_for(network, 80 + EXPECTED, rows=3)
    driver = limited_driver(network, max_kv_bytes=budget)
    with caplog.at_level(logging.WARNING):
        limited, taken, reserved = run_watched(driver, requests)
    assert [outcome.token_ids for outcome in limited] == [outcome.token_ids for outcome in free]
    assert {outcome.finish for outcome in limited} == {FinishReason.LENGTH}
    assert "request id=r2 pauses" in caplog.text
    assert reserved <= budget
    assert taken <= budget


def test_a_row_that_has_to_pause_as_it_joins_goes_on_later(networks, monkeypatch):
    requests = open_requests(2)
    free = Driver(networks("llama")).run(*requests)
    driver = Driver(networks("llama"))
    memory, scheduler = driver.loop.memory, driver.loop.scheduler
    before_step, paused = memory.before_step, []

    def pause_the_first_that_joins():
        before_step()
        for row in scheduler.active:
            if not paused and row.drawn == 0:
                paused.append(row)
                memory.pause(row)

    monkeypatch.setattr(memory, "before_step", pause_the_first_that_joins)
    limited, *_ = run_watched(driver, requests)
    assert [outcome.token_ids for outcome in limited] == [outcome.token_ids for outcome in free]
    assert paused


def test_a_pause_is_resumed_from_the_prompt_cache(networks):
    network = networks("llama")
    driver = limited_driver(network, max_kv_bytes=room_for(network, 300 + EXPECTED, rows=2))
    for i in range(2):
        request = make_request(f"r{i}", prompt_of(300, i), max_tokens=60, is_open_ended=True)
        driver.loop.requests.submit(request)
    while driver.loop.status().metrics["slots_taken"] < 2:
        driver.turn()
    while not driver.loop.status().metrics["waiting"]:
        driver.turn()
    computed = driver.loop.status().metrics["prompt_tokens"]
    while not driver.loop.is_idle:
        driver.turn()
    assert driver.loop.status().metrics["prompt_tokens"] == computed


def test_without_a_prompt_cache_a_pause_is_computed_again(networks):
    network = networks("llama")
    requests = open_requests(2)
    free = Driver(network).run(*requests)
    driver = limited_driver(network, max_kv_bytes=room_for(network, 90, rows=2), max_cache_bytes=0)
    limited, *_ = run_watched(driver, requests)
    assert [outcome.token_ids for outcome in limited] == [outcome.token_ids for outcome in free]


def test_penalties_and_logprobs_go_on_after_a_pause(networks):
    network = networks("llama")
    sampling = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, penalty_window=30)
    requests = open_requests(2, sampling=sampling, top_logprobs=2)
    free = Driver(network).run(*requests)
    driver = limited_driver(network, max_kv_bytes=room_for(network, 90, rows=2))
    limited, *_ = run_watched(driver, requests)
    for one, other in zip(limited, free, strict=True):
        assert one.token_ids == other.token_ids
        assert [e.logprob for e in one.logprobs] == pytest.approx(
            [e.logprob for e in other.logprobs], abs=1e-4
        )


def test_a_lone_request_that_fills_the_memory_ends_with_length(networks, caplog):
    network = networks("llama")
    [request] = open_requests(1, max_tokens=500)
    [free] = Driver(network).run(request)
    driver = limited_driver(network, max_kv_bytes=room_for(network, 200))
    with caplog.at_level(logging.WARNING):
        [limited], taken, _ = run_watched(driver, [request])
    assert limited.finish is FinishReason.LENGTH
    assert 200 - 40 <= len(limited.token_ids) <= 202 - 40
    assert limited.token_ids == free.token_ids[: len(limited.token_ids)]
    assert "ends at" in caplog.text
    assert taken <= room_for(network, 200)


def test_what_could_never_fit_is_refused_at_once(networks):
    network = networks("llama")
    driver = limited_driver(network, max_kv_bytes=room_for(network, 100))
    driver.loop.requests.submit(make_request("r", prompt_of(90), max_tokens=11))
    assert driver.loop.is_idle
    driver.turn()
    refused = driver.outcomes["r"].error
    assert isinstance(refused, OverloadedError)
    assert "90 prompt tokens and 11 generated" in str(refused)
    [served] = driver.run(make_request("s", prompt_of(89), max_tokens=11))
    assert served.finish is FinishReason.LENGTH


def test_requests_wait_while_their_limits_do_not_fit_together(networks):
    network = networks("llama")
    requests = [make_request(str(i), prompt_of(50, i), max_tokens=50) for i in range(4)]
    free = Driver(network).run(*requests)
    driver = limited_driver(network, max_kv_bytes=room_for(network, 100, rows=2))
    for request in requests:
        driver.loop.requests.submit(request)
    driver.turn()
    assert (
        driver.loop.status().metrics["slots_taken"],
        driver.loop.status().metrics["waiting"],
    ) == (2, 2)
    while not driver.loop.is_idle:
        driver.turn()
    assert [driver.outcome(r).token_ids for r in requests] == [o.token_ids for o in free]


def test_the_prompt_cache_gives_way_to_requests_and_grows_back(networks):
    network = networks("llama")
    budget = room_for(network, 2000)
    driver = limited_driver(network, max_kv_bytes=budget)
    for i in range(6):
        driver.run(make_request(f"old{i}", prompt_of(200, i), max_tokens=2))
    before = driver.loop.status().metrics
    assert before["prompt_cache.bytes"] > budget // 3
    request = make_request("large", prompt_of(1500, 99), max_tokens=300)
    driver.loop.requests.submit(request)
    driver.turn()
    squeezed = driver.loop.status().metrics
    assert squeezed["prompt_cache.budget_bytes"] == budget - room_for(network, 1800)
    assert (
        squeezed["prompt_cache.bytes"]
        <= squeezed["prompt_cache.budget_bytes"]
        < before["prompt_cache.bytes"]
    )
    assert squeezed["prompt_cache.evictions"] > before["prompt_cache.evictions"]
    driver.run()
    assert driver.outcome(request).finish is FinishReason.LENGTH
    assert driver.loop.status().metrics["prompt_cache.budget_bytes"] == budget


def test_a_cancelled_request_gives_its_memory_back_wherever_it_is(networks):
    network = networks("llama")
    driver = limited_driver(network, max_kv_bytes=room_for(network, 80 + EXPECTED, rows=3))
    requests = open_requests(5)
    for request in requests:
        driver.loop.requests.submit(request)
    seen = set()
    for _ in range(3 * EXPECTED):
        driver.turn()
        phases = {r.request_id: r.phase for r in driver.loop.status().requests}
        paused = [
            name
            for name, phase in phases.items()
            if phase is RequestPhase.WAITING and driver.outcomes.get(name)
        ]
        if paused:
            seen.update(paused)
            break
    assert seen
    for request in requests:
        driver.loop.requests.cancel(request.request_id)
        driver.loop.check()
    while not driver.loop.is_idle:
        driver.turn()
    assert driver.loop.status().memory_bytes["kv_reserved"] == 0


class FailsWithTwo(WrappedNetwork):
    """Fails the first step of two rows that comes after one of three."""

    rows = 0

    def __call__(self, inputs, cache):
        before, self.rows = self.rows, inputs.shape[0]
        if (before, self.rows) == (3, 2):
            raise RuntimeError("failed while a row paused")
        return super().__call__(inputs, cache)


def test_a_step_that_fails_while_a_row_pauses_costs_no_token(networks, caplog):
    requests = open_requests(3)
    free = Driver(networks("llama")).run(*requests)
    network = FailsWithTwo(networks("llama"))
    budget = room_for(networks("llama"), 80 + EXPECTED, rows=3)
    limited, *_ = run_watched(limited_driver(network, max_kv_bytes=budget), requests)
    assert [outcome.token_ids for outcome in limited] == [outcome.token_ids for outcome in free]
    assert "failed while a row paused" in caplog.text


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.one_in(2)
def test_a_crowd_that_comes_and_goes_loses_no_token(networks, seed):
    """Of all sizes and priorities, some cancelled; memory is for two or three at a time."""
    network = networks("llama")
    rng = random.Random(seed)
    requests = [
        make_request(
            f"r{i}",
            prompt_of(rng.randint(1, 150), i),
            max_tokens=rng.randint(1, 120),
            is_open_ended=rng.random() < 0.7,
            priority=rng.choice(list(Priority)),
            sampling=rng.choice([GREEDY, SEEDED]),
        )
        for i in range(24)
    ]
    free = Driver(network).run(*requests)
    driver = limited_driver(network, max_kv_bytes=room_for(network, 270, rows=2), max_slots=6)
    leaving = rng.sample(requests, 5)
    left = set()
    for request in requests:
        driver.loop.requests.submit(request)
    while not driver.loop.is_idle:
        driver.turn()
        if leaving and rng.random() < 0.02:
            request_id = leaving.pop().request_id
            driver.loop.requests.cancel(request_id)
            left.add(request_id)
            driver.loop.check()
    for request, expected in zip(requests, free, strict=True):
        outcome = driver.outcome(request)
        assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
        assert outcome.finish is expected.finish or request.request_id in left


def test_priorities_order_admission(networks):
    driver = Driver(networks("llama"), max_slots=1)
    names = {"low": Priority.LOW, "normal": Priority.NORMAL, "high": Priority.HIGH}
    driver.run(
        *(
            make_request(name, prompt_of(20), max_tokens=2, priority=priority)
            for name, priority in names.items()
        )
    )
    assert list(driver.outcomes) == ["high", "normal", "low"]
