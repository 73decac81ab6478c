"""The memory that the prompt cache and finished requests leave in use."""

import gc
import os
import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from engine_driver import VOCAB, Driver, make_request, prompt_of
from exact_network import WINDOW, ExactNetwork
from mlx_lm.models.cache import KVCache, _BaseCache
from token_blocks import anywhere
from wrapped_network import WrappedNetwork

from backend.cache.kv import MAX_NODE_TOKENS, Block, Segment, evaluate
from backend.cache.prompt_cache import PromptCache
from backend.cache.radix import TokenKey
from backend.core.step import FinishReason
from backend.engine.messages.protocol import Expect
from backend.engine.rows.row import Row
from backend.errors import GenerationFailedError

pytestmark = pytest.mark.mlx

KIB = 2**10
MIB = 2**20
LONG = prompt_of(300)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve_unlike_prompts(driver, count, rng):
    """Run requests that have nothing in common, some at once."""
    for first in range(0, count, 5):
        requests = []
        for i in range(first, first + 5):
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(12, 40))]
            requests.append(make_request(f"r{i}", tokens, max_tokens=rng.randint(1, 4)))
        driver.run(*requests)
        driver.outcomes.clear()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own books")
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
@pytest.mark.one_in(2)
def test_memory_stays_level_over_three_hundred_requests(networks, family):
    driver = Driver(networks(family), max_cache_bytes=400_000)
    rng = random.Random(9)
    serve_unlike_prompts(driver, 100, rng)
    gc.collect()
    resident, active = resident_bytes(), mx.get_active_memory()
    serve_unlike_prompts(driver, 200, rng)
    gc.collect()
    status = driver.loop.status().metrics
    assert status["prompt_cache.evictions"] > 200
    assert 300_000 < status["prompt_cache.bytes"] <= 400_000
    assert resident_bytes() < resident + 8 * MIB
    assert mx.get_active_memory() < active + MIB


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2", "qwen3_next"])
def test_nothing_but_the_weights_is_left_when_a_session_is_dropped(networks, family):
    network = networks(family)
    gc.collect()
    weights = mx.get_active_memory()
    driver = Driver(network)
    driver.run(*(make_request(f"r{i}", prompt_of(80 + i, salt=i)) for i in range(6)))
    assert mx.get_active_memory() > weights + 64 * KIB
    del driver
    gc.collect()
    # The last pass that nobody read may still be computed.
    mx.synchronize()
    # Constants of a first pass stay: a row of keys alone would be more.
    assert mx.get_active_memory() <= weights + 8 * KIB


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.one_in(3)
def test_no_token_of_branching_conversations_is_stored_twice(networks, family):
    network = networks(family)
    alone = Driver(network)
    alone.run(make_request("alone", LONG, max_tokens=1))
    status = alone.loop.status().metrics
    bytes_per_token = status["prompt_cache.bytes"] / status["prompt_cache.tokens"]
    driver = Driver(network)
    fed = set()
    trunk = prompt_of(200)
    for i in range(5):
        tokens = [*trunk, *prompt_of(20, salt=i + 1)]
        for turn in range(3):
            request = make_request(f"c{i} t{turn}", tokens, max_tokens=8)
            reply = driver.run(request)[0].token_ids
            fed |= {(*tokens, *reply)[:n] for n in range(1, len(tokens) + len(reply))}
            tokens = [*tokens, *reply, *prompt_of(15, salt=10 * i + turn)]
    status = driver.loop.status().metrics
    assert status["prompt_cache.tokens"] == len(fed)
    assert status["prompt_cache.bytes"] <= 1.1 * bytes_per_token * len(fed)


@pytest.mark.parametrize("chunk", [5, 30])
def test_a_system_prompt_is_taken_up_whole_however_long_a_conversation_gets(chunk):
    system = prompt_of(5 * WINDOW)
    driver = Driver(ExactNetwork("window", "kv"), max_cache_bytes=4000, prefill_chunk_alone=chunk)

    def ask(name, tokens):
        request = make_request(name, [*system, *tokens], max_tokens=2)
        prompt = replace(request.prompt, system_tokens=len(system))
        return driver.run(replace(request, prompt=prompt))[0]

    ask("other", prompt_of(5, salt=1))
    for length in range(1, 200, 12):
        ask(f"turn {length}", prompt_of(length, salt=2))
    assert driver.loop.status().metrics["prompt_cache.evictions"] > 0
    assert ask("new", prompt_of(7, salt=3)).cached_tokens == len(system)


def block_of(tokens):
    """A block of one KiB per token."""
    return Block(tokens, ((mx.zeros((1, 1, tokens, 256)),),))


def insert(store, ids, start):
    segment = Segment((block_of(len(ids) - start),))
    evaluate([segment])
    assert store.insert(TokenKey.from_ids(ids), start, segment)


def test_what_is_cut_off_a_segment_takes_no_memory():
    store = PromptCache(2**30, anywhere)
    before = mx.get_active_memory()
    insert(store, range(1000), 0)
    insert(store, range(1100), 0)
    insert(store, [*range(500), *range(5000, 5100)], 500)
    insert(store, [*range(900), *range(6000, 6100)], 850)
    store.pin(TokenKey.from_ids(range(20)))
    tokens = store.metrics()["prompt_cache.tokens"]
    assert tokens == 1300
    assert mx.get_active_memory() - before <= tokens * KIB + 64 * KIB


def test_what_there_is_no_room_for_is_not_copied():
    tokens = 8 * MAX_NODE_TOKENS
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, tokens, 128)), mx.zeros((1, 1, tokens, 128)))
    mx.eval(cache.state)
    block_bytes = MAX_NODE_TOKENS * KIB
    driver = Driver(ExactNetwork("kv"), max_cache_bytes=block_bytes + KIB)
    row = Row(make_request("long", [1] * tokens), cache=[cache], fed=tokens)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    driver.loop.prefixes.leave(row)
    assert driver.loop.status().metrics["prompt_cache.tokens"] == MAX_NODE_TOKENS
    assert mx.get_peak_memory() - before < 3 * block_bytes


class Poisoned(WrappedNetwork):
    """Fails after every pass that holds the poison."""

    POISON = VOCAB - 1

    def __call__(self, inputs, cache):
        logits = super().__call__(inputs, cache)
        if (inputs == self.POISON).any().item():
            raise RuntimeError("poison")
        return logits


def stop_by_token(driver):
    [probe] = driver.run(make_request("probe", LONG))
    [outcome] = driver.run(make_request("stops", LONG, stop=[probe.token_ids[4]], max_tokens=99))
    assert outcome.finish is FinishReason.STOP


def stop_by_length(driver):
    [outcome] = driver.run(make_request("ends", LONG))
    assert outcome.finish is FinishReason.LENGTH


def cancel_waiting(driver):
    for i in range(3):
        driver.loop.requests.submit(make_request(f"r{i}", LONG))
    for i in range(3):
        driver.loop.requests.cancel(f"r{i}")


def cancel_in_prefill(driver):
    driver.loop.requests.submit(make_request("a", LONG))
    driver.turn()
    [status] = driver.loop.status().requests
    assert 0 < status.prefilled_tokens < len(LONG) - 1
    driver.loop.requests.cancel("a")


def cancel_in_decode(driver):
    for i in range(3):
        driver.loop.requests.submit(make_request(f"r{i}", [*LONG[:90], i], max_tokens=99))
    while not all(row.generated_tokens > 2 for row in driver.loop.status().requests):
        driver.turn()
    for i in range(3):
        driver.loop.requests.cancel(f"r{i}")


def fail_in_prefill(driver):
    [outcome] = driver.run(make_request("bad", [*LONG, Poisoned.POISON, *LONG]))
    assert isinstance(outcome.error, GenerationFailedError)


def fail_in_decode(driver):
    good, bad = driver.run(make_request("good", LONG), make_request("bad", [3, Poisoned.POISON]))
    assert isinstance(bad.error, GenerationFailedError)
    assert good.finish is FinishReason.LENGTH


ENDINGS = [
    *(stop_by_token, stop_by_length, cancel_waiting, cancel_in_prefill, cancel_in_decode),
    *(fail_in_prefill, fail_in_decode),
]


@pytest.fixture
def _new_objects_only():
    """Hide the existing objects from the garbage collector."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_new_objects_only")
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.one_in(2)
def test_no_row_and_no_cache_outlives_a_request(networks, family, ending, caplog):
    # A log record keeps its traceback, and that the caches.
    caplog.set_level("CRITICAL", logger="backend")
    driver = Driver(Poisoned(networks(family)), prefill_chunk_alone=64)
    ending(driver)
    while not driver.loop.is_idle:
        driver.turn()
    driver.loop.check()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Row | _BaseCache)]


def test_a_conversation_that_waits_for_a_tool_is_evicted_after_one_that_has_ended(networks):
    network = networks("llama")
    prompts = [prompt_of(100, salt) for salt in range(3)]
    probe = Driver(network)
    probe.run(make_request("probe", prompts[0]))
    driver = Driver(
        network, max_cache_bytes=int(2.5 * probe.loop.status().metrics["prompt_cache.bytes"])
    )
    driver.run(make_request("waiting", prompts[0]))
    driver.turn(Expect("waiting"))
    driver.run(make_request("ended", prompts[1]))
    driver.run(make_request("new", prompts[2]))
    waiting, ended = (
        driver.run(make_request(f"again {i}", prompts[i], max_tokens=1))[0] for i in range(2)
    )
    assert waiting.cached_tokens == 99
    assert ended.cached_tokens < 99
