"""A failure around the prompt cache costs no other request a token, or its place in a batch."""

from dataclasses import replace

import pytest
from engine_driver import Driver, make_request, prompt_of
from exact_network import ExactNetwork
from wrapped_network import WrappedNetwork

from backend.core.prefix_listing import HitKind

pytestmark = pytest.mark.mlx

MIXTURES = [("kv",), ("window", "kv"), ("pair",), ("state",), ("state", "window", "kv")]


class FailsBehind(WrappedNetwork):
    """Fails one pass, when its caches have been written to."""

    def __init__(self, network, passes):
        super().__init__(network)
        self._passes_left = passes

    def __call__(self, inputs, cache):
        logits = super().__call__(inputs, cache)
        self._passes_left -= 1
        if self._passes_left == 0:
            raise RuntimeError("failed behind the pass")
        return logits


@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
@pytest.mark.parametrize("passes", [1, 2, 3, 4, 9])
def test_what_a_failed_pass_has_left_in_caches_is_never_taken_up(mixture, passes):
    network = ExactNetwork(*mixture)
    driver = Driver(FailsBehind(network, passes), prefill_chunk_alone=30)
    driver.run(make_request("fails", prompt_of(100), boundaries=[50]))
    again = make_request("again", prompt_of(140))
    [expected] = Driver(network, max_cache_bytes=0).run(again)
    assert driver.run(again)[0].token_ids == expected.token_ids


class FailsWhenArmed(WrappedNetwork):
    """Fails one decode step of a single request, whenever it is told to."""

    is_armed = False

    def __call__(self, inputs, cache):
        if self.is_armed and inputs.shape == (1, 1):
            self.is_armed = False
            raise RuntimeError("failed once")
        return super().__call__(inputs, cache)


def test_lone_requests_that_fail_behind_a_prefix_cost_no_batching(caplog):
    network = FailsWhenArmed(ExactNetwork("kv"))
    driver = Driver(network)
    prompt = prompt_of(100)
    [expected] = driver.run(make_request("first", prompt))
    for i in range(5):
        network.is_armed = True
        [outcome] = driver.run(make_request(f"r{i}", prompt))
        assert not network.is_armed
        assert outcome.token_ids == expected.token_ids
    assert "one request at a time" not in caplog.text


@pytest.mark.parametrize("part", ["store.insert", "store.pin", "layout.capture"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()])
def test_what_cannot_be_stored_fails_no_request(part, error):
    driver = Driver(ExactNetwork("kv", "state"))
    owner, name = part.split(".")

    def fail(*_, **__):
        raise error

    setattr(getattr(driver.loop.prefixes, owner), name, fail)
    request = make_request("r", prompt_of(100), boundaries=[50])
    request = replace(request, prompt=replace(request.prompt, system_tokens=40))
    [expected] = Driver(ExactNetwork("kv", "state"), max_cache_bytes=0).run(request)
    [outcome] = driver.run(request)
    assert (outcome.token_ids, outcome.error) == (expected.token_ids, None)
    assert not driver.loop.prefixes.store.nodes.held


def run_dry(session):
    while not session.is_idle:
        session.turn()


@pytest.mark.parametrize("part", ["store.insert", "layout.capture", "layout.restore"])
def test_a_store_that_other_ranks_keep_too_does_not_go_on_without_them(part):
    driver = Driver(ExactNetwork("kv"), is_replicated=True)
    owner, name = part.split(".")
    prompt = prompt_of(100)
    if name == "restore":
        driver.run(make_request("first", prompt))

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    setattr(getattr(driver.loop.prefixes, owner), name, fail)
    driver.loop.requests.submit(make_request("second", prompt))
    with pytest.raises(RuntimeError, match="out of memory"):
        run_dry(driver.loop)


def test_a_request_is_counted_once_however_often_it_begins_again():
    network = FailsWhenArmed(ExactNetwork("kv"))
    driver = Driver(network)
    driver.run(make_request("first", prompt_of(100)))
    network.is_armed = True
    driver.run(make_request("second", prompt_of(100)))
    status = driver.loop.status().metrics
    assert (status["prompt_cache.looked_up_tokens"], status["prompt_cache.hit_tokens"]) == (200, 0)
    assert sum(status[f"prompt_cache.hits.{kind.value}"] for kind in HitKind) == 2
