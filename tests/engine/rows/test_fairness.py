"""Shares of the engine, counted in chunks and steps."""

import itertools
import time

import pytest
from engine_driver import Driver, make_request, prompt_of

pytestmark = pytest.mark.mlx


def generated(driver):
    return {r.request_id: r.generated_tokens for r in driver.loop.status().requests}


def test_a_short_request_starts_within_a_few_chunks_of_a_long_prompt(networks):
    chunks = {"prefill_chunk_alone": 64, "prefill_chunk": 64}
    driver = Driver(networks("llama"), max_cache_bytes=0, **chunks)
    driver.loop.requests.submit(make_request("long", prompt_of(3000)))
    for _ in range(3):
        driver.turn()
    computed = driver.loop.status().metrics["prompt_tokens"]
    short = make_request("short", prompt_of(20))
    driver.loop.requests.submit(short)
    while not driver.outcome(short).token_ids:
        driver.turn()
    assert driver.loop.status().metrics["prompt_tokens"] - computed <= 19 + 2 * 64


def test_sixteen_equal_clients_advance_together(networks):
    driver = Driver(networks("llama"), max_cache_bytes=0)
    requests = [make_request(str(i), prompt_of(30, i), max_tokens=80) for i in range(16)]
    for request in requests:
        driver.loop.requests.submit(request)
    while min(generated(driver).values()) == 0:
        driver.turn()
    leads = generated(driver)
    for _ in range(20):
        driver.turn()
    now = generated(driver)
    assert {now[name] - leads[name] for name in now} == {20}


def test_clients_that_share_fewer_slots_get_equal_shares(networks):
    """Sixteen of them send one request after another; there are four slots."""
    driver = Driver(networks("llama"), max_slots=4, max_cache_bytes=0)
    turns = dict.fromkeys(range(16), 0)

    def send(client):
        turns[client] += 1
        name = f"{client}-{turns[client]}"
        driver.loop.requests.submit(make_request(name, prompt_of(12, client), max_tokens=3))

    for client in turns:
        send(client)
    ended = set()
    while min(turns.values()) < 5:
        driver.turn()
        for name, outcome in list(driver.outcomes.items()):
            if outcome.finish and name not in ended:
                ended.add(name)
                send(int(name.partition("-")[0]))
    assert max(turns.values()) - min(turns.values()) <= 1


def test_a_prompt_gets_on_while_rows_decode_though_every_pause_is_over_at_once(
    networks, monkeypatch
):
    driver = Driver(networks("llama"), prefill_pause_ms=1, prefill_chunk=16)
    stream = make_request("stream", prompt_of(5), max_tokens=400)
    driver.loop.requests.submit(stream)
    while not driver.outcome(stream).token_ids:
        driver.turn()
    ticks = itertools.count(time.monotonic(), 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    prompt = make_request("prompt", prompt_of(300), max_tokens=2)
    driver.loop.requests.submit(prompt)
    while driver.outcome(prompt).finish is None:
        driver.turn()
    assert driver.outcome(stream).finish is None
