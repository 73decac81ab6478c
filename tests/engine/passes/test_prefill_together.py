"""Prompts that fit one chunk are fed in one pass, and nobody can tell from the tokens."""

import pytest
from engine_driver import Driver, make_request, prompt_of
from wrapped_network import WrappedNetwork

pytestmark = pytest.mark.mlx

FAMILIES = ["llama", "qwen3", "qwen3_moe", "llama_wide"]


class Counting(WrappedNetwork):
    """Notes the shape of the tokens of every pass."""

    def __init__(self, network):
        super().__init__(network)
        self.shapes = []

    def __call__(self, inputs, cache):
        self.shapes.append(inputs.shape)
        return super().__call__(inputs, cache)


class RaisesTogether(Counting):
    """Cannot read several prompts at once."""

    def __call__(self, inputs, cache):
        rows, width = inputs.shape
        if rows > 1 and width > 1:
            raise ValueError("one at a time, please")
        return super().__call__(inputs, cache)


def requests(lengths):
    return [make_request(f"r{i}", prompt_of(n, salt=3 * i + 1)) for i, n in enumerate(lengths)]


def prefills(network):
    return [shape for shape in network.shapes if shape[1] > 1]


def tokens_of(outcomes):
    return [outcome.token_ids for outcome in outcomes]


def cold(network, prompts):
    return Driver(network, batches=False, max_cache_bytes=0).run(*prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_short_prompts_that_come_together_share_a_pass(networks, family):
    network = Counting(networks(family))
    prompts = requests([20, 31, 25, 17])
    outcomes = Driver(network, prefill_chunk_alone=512).run(*prompts)
    assert prefills(network)[0] == (4, 30)
    assert tokens_of(outcomes) == tokens_of(cold(networks(family), prompts))


def test_a_chunk_has_room_for_so_many_tokens_with_padding(networks):
    network = Counting(networks("llama"))
    prompts = requests([20, 31, 25, 17])
    outcomes = Driver(network, prefill_chunk_alone=64).run(*prompts)
    assert all(rows * width <= 64 for rows, width in prefills(network))
    assert tokens_of(outcomes) == tokens_of(cold(networks("llama"), prompts))


@pytest.mark.parametrize("stored", [90, 600])
def test_a_prompt_whose_beginning_is_stored_shares_the_pass_of_another(networks, stored):
    """It is copied for a row that shares a pass, or lies where it is stored."""
    network = Counting(networks("llama"))
    driver = Driver(network, prefill_chunk_alone=1024)
    prefix = prompt_of(stored)
    driver.run(make_request("before", prefix))
    network.shapes.clear()
    prompts = [
        make_request("new", prompt_of(31, salt=5)),
        make_request("goes on", [*prefix, *prompt_of(28, salt=7)]),
    ]
    outcomes = driver.run(*prompts)
    assert prefills(network) == [(2, 30)]
    assert [outcome.cached_tokens for outcome in outcomes] == [0, stored]
    assert tokens_of(outcomes) == tokens_of(cold(networks("llama"), prompts))


def test_prompts_of_unlike_length_do_not_share_a_pass(networks):
    network = Counting(networks("llama"))
    Driver(network, prefill_chunk_alone=512).run(*requests([9, 60]))
    assert prefills(network)[:2] == [(1, 8), (1, 59)]


def test_prompts_with_one_beginning_compute_it_once(networks):
    network = Counting(networks("llama"))
    common = prompt_of(80)
    prompts = [make_request(f"r{i}", [*common, i, i + 1]) for i in range(3)]
    outcomes = Driver(network, prefill_chunk_alone=512).run(*prompts)
    assert prefills(network)[0] == (1, 81)
    assert sum(outcome.cached_tokens for outcome in outcomes) == 2 * 80
    assert tokens_of(outcomes) == tokens_of(cold(networks("llama"), prompts))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v32"])
def test_families_that_do_not_give_padding_back_are_fed_one_by_one(networks, family):
    network = Counting(networks(family))
    Driver(network, prefill_chunk_alone=512).run(*requests([20, 25]))
    assert all(rows == 1 for rows, _ in prefills(network))


def test_prompts_that_fail_together_are_fed_alone(networks):
    network = RaisesTogether(networks("llama"))
    prompts = requests([20, 31, 25])
    outcomes = Driver(network, prefill_chunk_alone=512).run(*prompts)
    assert all(outcome.error is None for outcome in outcomes)
    assert all(rows == 1 for rows, _ in prefills(network))
    assert tokens_of(outcomes) == tokens_of(cold(networks("llama"), prompts))


class AsksForWhom(Counting):
    """Notes for whom each pass is said to be."""

    def __init__(self, network):
        super().__init__(network)
        self.noted, self.owners = (), []

    def note(self, request_ids, **_):
        self.noted = request_ids

    def __call__(self, inputs, cache):
        self.owners.append(sorted(self.noted))
        return super().__call__(inputs, cache)


def test_before_a_pass_all_are_noted_whose_prompts_it_feeds(networks):
    network = AsksForWhom(networks("llama"))
    driver = Driver(network, prefill_chunk_alone=512)
    driver.desk.note_pass = network.note
    driver.run(*requests([20, 31, 25, 60]))
    passes = list(zip(network.shapes, network.owners, strict=True))
    assert ((3, 30), ["r0", "r1", "r2"]) in passes
    assert ((1, 59), ["r3"]) in passes
