"""Whatever the prompt cache serves, the tokens are those of a cold prefill."""

import random

import mlx.core as mx
import pytest
from engine_driver import Driver, make_request, prompt_of
from mlx.utils import tree_flatten

from backend.cache.radix import TokenKey
from backend.core.metric_table import nested
from backend.core.request import SamplingParams

pytestmark = pytest.mark.mlx

CUTTABLE = ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32"]
STATEFUL = ["qwen3_next", "qwen3_5", "mamba2", "nemotron_h", "granitemoehybrid", "llama4"]
SEEDED = SamplingParams(temperature=1.0, seed=7)
BASE = prompt_of(150)
NEW = prompt_of(60, salt=3)


def is_of_tokens(value):
    return isinstance(value, mx.array) and value.ndim > 2


def driver_for(networks, family, **tuning):
    return Driver(networks(family), **tuning)


def cold(networks, family, *requests):
    outcomes = driver_for(networks, family, max_cache_bytes=0).run(*requests)
    assert all(outcome.cached_tokens == 0 for outcome in outcomes)
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("family", [*CUTTABLE, *STATEFUL])
@pytest.mark.parametrize(
    ("tokens", "reused", "reused_with_state"),
    [
        pytest.param(BASE, 149, 149, id="exact"),
        pytest.param([*BASE, *NEW], 150, 149, id="longer"),
        pytest.param(BASE[:90], 89, 64, id="shorter"),
        pytest.param([*BASE[:90], *NEW], 90, 64, id="diverging"),
        pytest.param(NEW, 0, 0, id="unrelated"),
    ],
)
@pytest.mark.one_in(8)
def test_a_warm_prompt_gives_the_tokens_of_a_cold_one(
    networks, family, sampling, tokens, reused, reused_with_state
):
    driver = driver_for(networks, family)
    driver.run(make_request("first", BASE, sampling=sampling, boundaries=[64], max_tokens=3))
    request = make_request("second", tokens, sampling=sampling, max_tokens=6)
    outcome = driver.run(request)[0]
    assert outcome.token_ids == cold(networks, family, request)[0]
    assert outcome.cached_tokens == (reused_with_state if family in STATEFUL else reused)


@pytest.mark.parametrize("family", [*CUTTABLE, *STATEFUL])
@pytest.mark.one_in(3)
def test_a_second_turn_takes_up_prompt_and_reply(networks, family):
    driver = driver_for(networks, family)
    first = make_request("first", BASE, max_tokens=40)
    reply = driver.run(first)[0].token_ids
    second = make_request("second", [*BASE, *reply, *NEW])
    outcome = driver.run(second)[0]
    # The last token of a reply is drawn and never fed.
    assert outcome.cached_tokens == len(BASE) + len(reply) - 1
    assert outcome.token_ids == cold(networks, family, second)[0]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_a_reply_that_ended_with_a_stop_token_is_taken_up(networks, family):
    [expected] = cold(networks, family, make_request("probe", BASE, max_tokens=12))
    driver = driver_for(networks, family)
    first = make_request("first", BASE, stop=[expected[-1]], max_tokens=100)
    reply = driver.run(first)[0].token_ids
    second = make_request("second", [*BASE, *reply, *NEW])
    outcome = driver.run(second)[0]
    assert outcome.cached_tokens >= len(BASE) + len(reply) - 1
    assert outcome.token_ids == cold(networks, family, second)[0]


@pytest.mark.parametrize("family", [*CUTTABLE, *STATEFUL])
@pytest.mark.one_in(4)
def test_eight_at_once_on_one_prefix_compute_it_once(networks, family):
    requests = [
        make_request(f"r{i}", [*BASE, *prompt_of(20 + i, salt=i)], boundaries=[len(BASE)])
        for i in range(8)
    ]
    driver = driver_for(networks, family, prefill_chunk=64)
    outcomes = driver.run(*requests)
    assert [o.token_ids for o in outcomes] == cold(networks, family, *requests)
    status = driver.loop.status().metrics
    assert status["prompt_cache.looked_up_tokens"] == sum(len(r.prompt.token_ids) for r in requests)
    assert status["prompt_cache.hit_tokens"] >= 7 * (len(BASE) - 1)


@pytest.mark.parametrize("family", [*CUTTABLE, *STATEFUL])
@pytest.mark.one_in(3)
def test_an_aborted_prefill_goes_on_where_it_stopped(networks, family):
    driver = driver_for(networks, family)
    long = prompt_of(300)
    driver.loop.requests.submit(make_request("aborted", long))
    for _ in range(3):
        driver.turn()
    [status] = driver.loop.status().requests
    assert 0 < status.prefilled_tokens < 299
    driver.loop.requests.cancel("aborted")
    request = make_request("again", long)
    outcome = driver.run(request)[0]
    assert outcome.cached_tokens == status.prefilled_tokens
    assert outcome.token_ids == cold(networks, family, request)[0]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_requests_on_shared_prefixes_that_come_and_go_at_any_step_are_right(networks, family):
    rng = random.Random(11)
    trunks = [prompt_of(rng.randint(40, 130), salt=s) for s in range(3)]
    driver = driver_for(networks, family, prefill_chunk=24, max_cache_bytes=250_000)
    requests = []
    for i in range(20):
        trunk = rng.choice(trunks)
        shared = trunk[: rng.choice([9, 40, len(trunk)])]
        tokens = [*shared, *prompt_of(rng.randint(1, 40), salt=i % 5)]
        sampling = SEEDED if i % 2 else SamplingParams()
        requests.append(
            make_request(f"r{i}", tokens, sampling=sampling, max_tokens=rng.randint(1, 20))
        )
        driver.loop.requests.submit(requests[-1])
        for _ in range(rng.randint(0, 5)):
            driver.turn()
        if i % 7 == 6:
            driver.loop.requests.cancel(f"r{i - 1}")
    driver.run()
    finished = [r for r in requests if driver.outcome(r).finish is not None]
    assert len(finished) > 13
    tokens = [driver.outcomes[r.request_id].token_ids for r in finished]
    assert tokens == cold(networks, family, *finished)
    status = driver.loop.status()
    assert status.metrics["prompt_cache.evictions"] > 0
    assert status.metrics["prompt_cache.hit_tokens"] > 0
    assert status.memory_bytes["prompt_cache"] == status.metrics["prompt_cache.bytes"]


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.one_in(2)
def test_a_place_where_prompts_branched_is_where_the_next_one_is_taken_up(networks, family):
    driver = driver_for(networks, family)
    requests = [make_request(f"r{i}", [*BASE, *prompt_of(30, salt=i)]) for i in range(3)]
    outcomes = [driver.run(request)[0] for request in requests]
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 0, len(BASE)]
    assert [outcome.token_ids for outcome in outcomes] == cold(networks, family, *requests)


def test_no_state_is_stored_a_token_behind_another(networks):
    driver = driver_for(networks, "mamba2")
    driver.run(make_request("first", BASE))
    two_states = driver.loop.status().metrics["prompt_cache.bytes"]
    driver.run(make_request("second", [*BASE, *NEW]))
    assert driver.loop.status().metrics["prompt_cache.bytes"] == 2 * two_states


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next", "mamba2"])
@pytest.mark.one_in(2)
def test_the_middle_of_a_conversation_gives_way_before_its_end(networks, family):
    def last_turn(**tuning):
        driver = driver_for(networks, family, **tuning)
        tokens = list(BASE)
        for turn in range(8):
            outcome = driver.run(make_request(f"t{turn}", tokens, boundaries=[len(tokens) - 9]))[0]
            tokens += [*outcome.token_ids, *prompt_of(30, salt=turn)]
        return outcome, driver.loop.status().metrics

    roomy, books = last_turn()
    assert books["prompt_cache.evictions"] == 0
    tight, tight_books = last_turn(max_cache_bytes=int(0.8 * books["prompt_cache.bytes"]))
    assert tight_books["prompt_cache.evictions"] == 0
    assert tight_books["prompt_cache.tokens"] == books["prompt_cache.tokens"]
    assert tight.token_ids == roomy.token_ids
    assert tight.cached_tokens == roomy.cached_tokens > 0


@pytest.mark.parametrize("next_question", [64, 0])
def test_where_the_next_question_parts_outlives_the_reply_that_it_drops(networks, next_question):
    driver = driver_for(networks, "qwen3_next")
    driver.run(make_request("first", BASE, boundaries=[64], next_question=next_question))
    prefixes = driver.loop.prefixes
    question, reply = (TokenKey.from_ids(parted(BASE, place, 3)) for place in (64, 149))
    room = driver.loop.status().metrics["prompt_cache.bytes"]
    while restorable(prefixes, question) == 64 and restorable(prefixes, reply) == 149:
        room -= 100
        prefixes.leave_room(room)
    assert (restorable(prefixes, question) == 64) == bool(next_question)


def restorable(prefixes, key):
    return sum(piece.tokens for piece in prefixes.store.preview(key))


def parted(tokens, place, salt):
    return [*tokens[:place], *prompt_of(60, salt)]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_that_were_given_up_come_back_when_they_are_computed_anyway(networks, family):
    driver = driver_for(networks, family)
    driver.run(make_request("first", BASE, max_tokens=3))
    prefixes = driver.loop.prefixes
    room = driver.loop.status().metrics["prompt_cache.bytes"]
    place = 100
    key = TokenKey.from_ids(parted(BASE, place, 3))
    while restorable(prefixes, key) == place:
        room -= 100
        prefixes.leave_room(room)
    prefixes.leave_room(2**30)
    requests = [make_request(f"{salt}", parted(BASE, place, salt)) for salt in (3, 4)]
    outcomes = [driver.run(request)[0] for request in requests]
    assert outcomes[0].cached_tokens < place
    assert outcomes[1].cached_tokens == place
    assert [each.token_ids for each in outcomes] == [
        cold(networks, family, request)[0] for request in requests
    ]


def test_a_failed_restore_is_computed_once_and_never_tried_again(networks, caplog):
    driver = driver_for(networks, "llama")
    driver.run(make_request("first", BASE))

    def restore(*_):
        raise ValueError("torn")

    driver.loop.prefixes.layout.restore = restore
    request = make_request("second", BASE)
    outcome = driver.run(request)[0]
    assert outcome.token_ids == cold(networks, "llama", request)[0]
    assert outcome.cached_tokens == 0
    assert caplog.text.count("its prefix cannot be restored") == 1


def test_a_pass_that_fails_behind_a_cached_prefix_is_tried_without_it(networks):
    network = networks("llama")

    class FailsWhenWarm:
        """Fails on the first chunk after a prefix."""

        has_failed = False

        def __init__(self):
            self.layers = network.layers

        def __call__(self, inputs, cache):
            if cache[0].offset == 149 and inputs.shape[1] > 1 and not self.has_failed:
                self.has_failed = True
                raise RuntimeError("bad prefix")
            return network(inputs, cache=cache)

    fails = FailsWhenWarm()
    driver = Driver(fails)
    driver.run(make_request("first", BASE, max_tokens=1))
    request = make_request("second", [*BASE[:149], *NEW])
    outcome = driver.run(request)[0]
    assert fails.has_failed
    assert outcome.token_ids == cold(networks, "llama", request)[0]
    again = driver.run(make_request("third", BASE))[0]
    assert again.cached_tokens == len(BASE) - 1


def test_an_unrelated_sampler_takes_up_the_same_prefix(networks):
    driver = driver_for(networks, "llama")
    driver.run(make_request("greedy", BASE))
    outcome = driver.run(make_request("seeded", BASE, sampling=SEEDED))[0]
    assert outcome.cached_tokens == 149


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v32", "qwen3_next"])
@pytest.mark.one_in(2)
def test_rows_leave_a_batch_with_plain_caches_of_their_own(networks, family):
    driver = driver_for(networks, family)
    left = []
    driver.loop.prefixes.leave = lambda row: left.append(row.cache) if row.cache else None
    driver.run(*(make_request(f"r{i}", prompt_of(40 + i, salt=i)) for i in range(3)))
    fresh = driver.loop.prefixes.fresh_caches()
    assert len(left) == 3
    for caches in left:
        assert [type(cache) for cache in caches] == [type(cache) for cache in fresh]
        assert all(
            a.shape[0] == 1 for _, a in tree_flatten([c.state for c in caches]) if is_of_tokens(a)
        )


def test_storing_takes_no_more_memory_than_what_is_stored(networks):
    driver = driver_for(networks, "llama", prefill_chunk_alone=512)
    keeper = driver.loop.prefixes
    save, peaks = keeper.save, []

    def measured(row):
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        stored = keeper.metrics()["prompt_cache.bytes"]
        save(row)
        peaks.append(
            (mx.get_peak_memory() - active, keeper.metrics()["prompt_cache.bytes"] - stored)
        )

    keeper.save = measured
    driver.run(make_request("long", prompt_of(1100), max_tokens=1))
    assert any(stored for _, stored in peaks)
    assert all(peak <= 1.1 * stored + 2**16 for peak, stored in peaks)


def test_kinds_of_hits_and_tokens_are_counted(networks):
    driver = driver_for(networks, "llama")
    prompts = [BASE, BASE, [*BASE, 1, 2], BASE[:40], [*BASE[:40], 3, 3], NEW]
    for i, tokens in enumerate(prompts):
        driver.run(make_request(f"r{i}", tokens, max_tokens=1))
    status = driver.loop.status().metrics
    assert nested(status)["prompt_cache"]["hits"] == {
        "miss": 2,
        "exact": 1,
        "shorter": 1,
        "longer": 1,
        "diverging": 1,
    }
    assert status["prompt_cache.looked_up_tokens"] == sum(map(len, prompts))
    assert status["prompt_cache.hit_tokens"] == 149 + 150 + 39 + 40


def test_a_prefix_of_one_token_is_no_hit(networks):
    driver = driver_for(networks, "llama")
    driver.run(make_request("first", BASE))
    outcome = driver.run(make_request("second", [BASE[0], *NEW]))[0]
    assert outcome.cached_tokens == 0


def test_nothing_is_stored_without_a_budget(networks):
    driver = driver_for(networks, "llama", max_cache_bytes=0)
    driver.run(make_request("a", BASE), make_request("b", BASE))
    assert driver.loop.status().metrics["prompt_cache.nodes"] == 0


def test_something_volatile_early_in_a_prompt_is_told_once(networks, caplog):
    driver = driver_for(networks, "llama")
    for i in range(4):
        driver.run(make_request(f"r{i}", [*BASE[:20], 400 + i, 300 + i, *BASE[22:]]))
    assert caplog.text.count("in a few tokens after the first 20,") == 1
    assert "a counter there costs the prompt cache the other" in caplog.text


def test_a_thought_that_a_template_takes_out_of_a_reply_is_no_cause_for_a_warning(networks, caplog):
    driver = driver_for(networks, "llama")
    (outcome,) = driver.run(make_request("asked", BASE, max_tokens=80))
    reply = outcome.token_ids
    # The next question has the reply without its first ten tokens.
    driver.run(make_request("again", [*BASE, *reply[10:], *NEW]))
    assert "costs the prompt cache" not in caplog.text
