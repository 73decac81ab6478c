"""Passes that begin while they are built: when, in which order, and with which caches."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from drafting import FEW, FREE
from engine_driver import Driver, make_request, prompt_of
from wrapped_network import WrappedNetwork

from backend.core.request import SamplingParams
from backend.engine.kv.batch_caches import early_start

pytestmark = pytest.mark.mlx


@pytest.fixture
def dispatched(monkeypatch):
    """Return the arrays of each dispatch, in order."""
    found = []
    dispatch = mx.async_eval

    def spy(*arrays):
        found.append(arrays)
        dispatch(*arrays)

    monkeypatch.setattr(mx, "async_eval", spy)
    return found


def layer(place, *, is_empty=False):
    return SimpleNamespace(state=[mx.array(place)], empty=lambda: is_empty)


def places(dispatched):
    return [state[0].item() for (state,) in dispatched]


def test_the_device_begins_while_the_later_layers_are_built(dispatched):
    built = []

    def network(inputs, cache):
        for place, _ in enumerate(cache):
            built.append((place, places(dispatched)))
        return inputs

    early_start(network, mx.array([[1]]), [layer(place) for place in range(10)])
    assert [begun for _, begun in built] == [
        *([], [0], [0, 1], [0, 1]),
        *[[0, 1, 3]] * 4,
        *[[0, 1, 3, 7]] * 2,
    ]


def test_a_part_of_the_layers_is_begun_as_well(dispatched):
    def network(inputs, cache):
        list(cache[:-1])
        return inputs

    early_start(network, mx.array([[1]]), [layer(place) for place in range(4)])
    assert places(dispatched) == [0, 1]


def test_a_layer_without_a_state_is_not_begun(dispatched):
    def network(inputs, cache):
        list(cache)
        return inputs

    early_start(network, mx.array([[1]]), [layer(place, is_empty=place < 1) for place in range(4)])
    assert places(dispatched) == [1]


def test_a_cache_that_the_network_replaces_stays_replaced():
    other = layer(7)

    def network(inputs, cache):
        cache[1] = other
        return inputs

    caches = [layer(place) for place in range(3)]
    early_start(network, mx.array([[1]]), caches)
    assert caches[1] is other


class Watched(WrappedNetwork):
    """Notes the tokens of each pass, and whether it begins while it is built."""

    def __init__(self, network, dispatched):
        super().__init__(network)
        self.passes = []
        self._dispatched = dispatched

    def __call__(self, inputs, cache):
        before = len(self._dispatched)
        logits = super().__call__(inputs, cache)
        self.passes.append((inputs.size, len(self._dispatched) > before))
        return logits


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_a_pass_begins_early_unless_another_is_in_flight(networks, family, dispatched):
    network = Watched(networks(family), dispatched)
    driver = Driver(network)
    network.passes.clear()
    driver.run(make_request("a", prompt_of(20), max_tokens=6))
    prompt, first, *_, latest, last = network.passes
    assert prompt == (19, False)
    assert first == (1, True)
    assert latest == last == (1, False)


def test_a_pass_after_one_whose_tokens_have_been_read_begins_early(networks, dispatched):
    network = Watched(networks("llama"), dispatched)
    driver = Driver(network)
    driver.loop.requests.submit(make_request("a", prompt_of(20), max_tokens=20))
    for _ in range(8):
        driver.turn()
    assert network.passes[-1] == (1, False)
    driver.loop.requests.submit(make_request("b", prompt_of(20)[5:], max_tokens=20))
    network.passes.clear()
    for _ in range(3):
        driver.turn()
    assert network.passes[:2] == [(14, False), (2, True)]


def test_a_pass_with_drafts_begins_early(networks, dispatched):
    network = Watched(networks("llama"), dispatched)
    sampling = SamplingParams(logit_bias=FEW)
    requests = [make_request(n, prompt_of(20), sampling=sampling, max_tokens=80) for n in "ab"]
    driver = Driver(network, pass_seconds=FREE)
    network.passes.clear()
    driver.run(*requests)
    decoding = network.passes[network.passes.index((len(requests), True)) :]
    drafted = [is_early for tokens, is_early in decoding if tokens > len(requests)]
    assert drafted
    assert all(drafted)
