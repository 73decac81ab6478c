"""The limits of a device, given here: how long a pass may be, and how many arrays it holds."""

import math
from contextlib import contextmanager

import mlx.core as mx
import pytest
from engine_driver import Driver, make_request, prompt_of, room_for
from mlx.utils import tree_flatten
from wrapped_network import WrappedNetwork

from backend.cache.layers import in_pieces
from backend.config import METAL_PASS_S, TuningOptions
from backend.core.scoring import EmbeddingRequest, Pooling
from backend.core.step import Steps
from backend.engine.messages.protocol import Passing, Submit
from backend.engine.passes.agreement import ALONE
from backend.engine.passes.caches import make_cache_factory
from backend.engine.supervision.open_calls import OpenCalls
from backend.engine.trials.trial_steps import at_once, difference, prefilled
from backend.errors import EngineFailedError, OverloadedError
from backend.model.device import DEVICE

pytestmark = pytest.mark.mlx

METAL = {"resource_limit": 499_000, "max_recommended_working_set_size": 2**34}


class Timed(WrappedNetwork):
    """Takes seconds of a clock of its own: for each token, and for each one that it looks at."""

    def __init__(self, network, clock):
        super().__init__(network)
        self._clock = clock
        self.passes = []

    def __call__(self, inputs, cache):
        offsets = (getattr(layer, "offset", 0) for layer in cache)
        context = max((int(mx.array(offset).max().item()) for offset in offsets), default=0)
        seconds = inputs.size * (0.01 + 0.0001 * context)
        self._clock[0] += seconds
        self.passes.append((inputs.size, seconds))
        return super().__call__(inputs, cache)


@pytest.fixture
def metal():
    """A device that names the limits of Metal."""
    with device_of(METAL):
        yield


@contextmanager
def device_of(info):
    before = DEVICE.pass_limit_s, DEVICE.max_arrays, DEVICE.rounds_float32_as
    DEVICE.adapt_to(info)
    yield
    DEVICE.pass_limit_s, DEVICE.max_arrays, DEVICE.rounds_float32_as = before


PATIENT = {"prefill_pause_ms": 60_000, "prefill_chunk_alone": 2048, "prefill_chunk": 2048}


def longest_s(network):
    return max(seconds for _, seconds in network.passes)


def work(networks, clock, prompts, texts=(), **options):
    network = Timed(networks("llama"), clock)
    driver = Driver(network, **PATIENT, **options)
    for text in texts:
        request = EmbeddingRequest(token_ids=text, pooling=Pooling.MEAN, is_normalized=False)
        driver.begin(request)
    outcomes = driver.run(*(make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)))
    return network, outcomes


LONG = [prompt_of(700)]
TOGETHER = [prompt_of(150, salt=i) for i in range(6)]


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("prompts", [LONG, TOGETHER, LONG + TOGETHER])
def test_no_pass_is_longer_than_metal_tolerates(networks, clock, prompts):
    network, outcomes = work(networks, clock, prompts, texts=[tuple(prompt_of(300))])
    assert longest_s(network) <= METAL_PASS_S
    # It is not the smallest size that keeps them short.
    assert max(tokens for tokens, _ in network.passes) > 32
    assert all(len(outcome.token_ids) == 12 for outcome in outcomes)


def test_without_such_a_limit_a_patient_server_has_longer_ones(networks, clock):
    network, _ = work(networks, clock, LONG)
    assert longest_s(network) > METAL_PASS_S


def tried(networks, clock):
    network = Timed(networks("llama"), clock)
    caches = make_cache_factory(network, TuningOptions())()
    at_once(prefilled(ALONE, network, caches, prompt_of(700)))
    assert sum(tokens for tokens, _ in network.passes) == caches[0].offset == 700
    return network


@pytest.mark.usefixtures("metal")
def test_no_pass_of_a_trial_is_longer_either(networks, clock):
    assert longest_s(tried(networks, clock)) <= METAL_PASS_S


def test_a_trial_without_a_limit_has_few_passes(networks, clock):
    assert [tokens for tokens, _ in tried(networks, clock).passes] == [512, 188]


@pytest.mark.parametrize(
    ("dtype", "on_a_cpu", "on_a_gpu"),
    [(mx.float32, False, True), (mx.float16, True, True), (mx.bfloat16, True, True)],
)
def test_a_gpu_may_round_float32_as_it_does_float16(dtype, on_a_cpu, on_a_gpu):
    expected, found = mx.array([[0.0, 0.0]], dtype), mx.array([[0.0, 0.07]], dtype)
    assert (difference([expected], [found]) is None) is on_a_cpu
    for info in (METAL, {"compute_capability_major": 9}):
        with device_of(info):
            assert (difference([expected], [found]) is None) is on_a_gpu
            assert "differ" in difference([expected], [found * 20])


def test_a_request_that_cost_an_engine_is_tried_in_smaller_passes(networks):
    def widest(losses):
        network = Timed(networks("llama"), [0.0])
        driver = Driver(network, prefill_chunk_alone=64, max_cache_bytes=0)
        request = make_request("a", prompt_of(200))
        driver.turn(Submit(request, (), losses))
        return max(tokens for tokens, _ in network.passes), driver.run() or driver.outcome(request)

    (tokens, _), (fewer, outcome) = widest(0), widest(1)
    assert (tokens, fewer) == (64, 16)
    assert len(outcome.token_ids) == 12


def test_the_next_process_hears_of_the_losses_over_a_request():
    calls = OpenCalls()
    inside, outside = (calls.submit(make_request(name, [1])) for name in ("in", "out"))
    inside.is_sent = outside.is_sent = True
    calls.note_loss(Passing(["in"]), [], EngineFailedError("the watchdog"))
    assert (inside.order().losses, outside.order().losses) == (1, 0)
    inside.note(Steps(token_ids=[5]))
    assert inside.order() == Submit(inside.request, (5,), 0)


@pytest.mark.parametrize(("piece_bytes", "sizes"), [(1, [1, 1]), (2**30, [2])])
def test_a_stored_prefix_is_copied_in_pieces(networks, piece_bytes, sizes):
    network = networks("llama")
    caches = make_cache_factory(network, TuningOptions())()
    mx.eval(network(mx.array([prompt_of(8)]), cache=caches))
    pieces = list(in_pieces(caches, piece_bytes))
    assert [len(piece) for piece in pieces] == sizes
    assert [state for piece in pieces for state in piece] == [cache.state for cache in caches]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_where_few_arrays_fit_the_prompt_cache_evicts_and_replies_stay_the_same(networks, family):
    trunk = prompt_of(40)
    requests = [
        make_request(f"r{i}", [*trunk[: 8 + i % 3 * 8], *prompt_of(20, salt=i)], max_tokens=4)
        for i in range(16)
    ]

    def play(max_arrays):
        with device_of({"resource_limit": max_arrays}):
            driver = Driver(networks(family), expected_tokens=4)
        again = make_request("again", requests[-1].prompt.token_ids, max_tokens=4)
        outcomes = [driver.run(request)[0].token_ids for request in (*requests, again)]
        return driver.loop.prefixes.store, outcomes

    plenty, expected = play(499_000)
    few, outcomes = play(250)
    assert outcomes == expected
    weights = len(tree_flatten(networks(family).parameters()))
    assert few.nodes.size.arrays <= (250 - weights) / 2 < plenty.nodes.size.arrays
    evictions, hits = (f"prompt_cache.{name}" for name in ("evictions", "hits.exact"))
    assert plenty.metrics()[evictions] == 0 < few.metrics()[evictions]
    assert few.metrics()[hits] == 1


class Hungry(WrappedNetwork):
    """Takes 400,000 bytes for each token while it runs, far more than the network inside."""

    def __call__(self, inputs, cache):
        scratch = mx.zeros((inputs.size, 100_000))
        mx.eval(scratch)
        return super().__call__(inputs, cache)


def serve(networks, pass_bytes, *prompts):
    """Return outcomes, and of each pass of prompts its tokens and the bytes that it took."""
    driver = Driver(
        Hungry(networks("llama")),
        prefill_chunk_alone=256,
        max_cache_bytes=0,
        max_kv_bytes=room_for(networks("llama"), 1100),
        pass_bytes=pass_bytes,
    )
    taken, passes = [], driver.loop.memory.reservations.passes
    learn = passes.record
    passes.record = lambda tokens, stop, nbytes: (
        taken.append((tokens, nbytes)),
        learn(tokens, stop, nbytes),
    )
    requests = [make_request(f"r{i}", each) for i, each in enumerate(prompts)]
    for request in requests:
        driver.turn(Submit(request, (), 0))
        driver.run()
    return [driver.outcome(request) for request in requests], taken


def test_a_chunk_that_would_take_too_much_memory_is_smaller_and_the_reply_the_same(networks):
    prompt, limit = prompt_of(1000), 40_000_000
    [free], plenty = serve(networks, math.inf, prompt)
    [cut], taken = serve(networks, limit, prompt)
    assert cut.token_ids == free.token_ids
    assert max(nbytes for _, nbytes in plenty) > 2 * limit
    # The first passes show how much one takes.
    assert max(nbytes for _, nbytes in taken[2:]) < 1.2 * limit
    assert all(50 < tokens < 120 for tokens, _ in taken[2:-1])


def test_a_prompt_is_refused_once_not_even_a_small_pass_fits(networks):
    prompts = prompt_of(900), prompt_of(900, salt=1)
    [first, second], taken = serve(networks, 1_000_000, *prompts)
    for outcome in (first, second):
        assert isinstance(outcome.error, OverloadedError)
        assert "the last 16 of 900 prompt tokens takes at least 6." in str(outcome.error)
        assert "1.0 MiB are left" in str(outcome.error)
    # The second one is not begun.
    assert [tokens for tokens, _ in taken] == [128, 16]
    [short], _ = serve(networks, 1_000_000, prompt_of(12))
    assert len(short.token_ids) == 12
