"""A draft model changes no reply, whatever it writes, and is right where it is the model."""

from dataclasses import replace

import mlx.core as mx
import pytest
from drafting import (
    CROWDS,
    FEW,
    FREE,
    Cycle,
    Free,
    assert_same,
    requests_of,
    requests_of_one_prefix,
    require_same_as_they_come_and_go,
)
from engine_driver import VOCAB, Driver, make_request, model_of, prompt_of, room_for
from vision import picture
from wrapped_network import CountingNetwork, WrappedNetwork

from backend.config import ModelOptions
from backend.core.prompt import MediaKind
from backend.core.request import SamplingParams
from backend.engine.trials.draft_model import LoadedDraft, look_at_draft
from backend.errors import UnsupportedModelError
from backend.model.loader import load
from backend.model.vision.media_processor import find_spans

pytestmark = pytest.mark.mlx

FAMILIES = ("llama", "gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_5", "mamba2")


class FreeDraft(LoadedDraft):
    def batch(self, vocab_size):
        batch = super().batch(vocab_size)
        batch.costs = Free(FREE)
        return batch


_LOOKS = {}


def draft_of(network, *, free=True):
    """Return a network as a draft model; it is looked at once."""
    inner = network
    while hasattr(inner, "network"):
        inner = inner.network
    if id(inner) not in _LOOKS:
        _LOOKS[id(inner)] = inner, look_at_draft(model_of(inner), range(VOCAB), batches=True)
    look = _LOOKS[id(inner)][1]
    kind = FreeDraft if free else LoadedDraft
    return kind(model_of(network), replace(look.fresh_caches, network=network), look.profile)


def driver_of(network, draft, **options):
    """Return a driver that drafts by a model alone."""
    options = {"pass_seconds": FREE, "speculation": "draft", **options}
    return Driver(network, draft=draft_of(draft), **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "seeds", "other"), [(*CROWDS[0], "qwen3"), (*CROWDS[1], "llama")])
@pytest.mark.one_in(4)
def test_a_reply_is_the_same_whoever_drafts(networks, family, rows, seeds, other):
    network, drafted = networks(family), 0
    for seed in seeds:
        requests = requests_of(seed, rows, longest=24)
        expected = Driver(network).run(*requests)
        driver = driver_of(network, networks(other))
        assert_same(driver.run(*requests), expected)
        drafted += driver.loop.status().metrics["drafted_tokens"]
    assert drafted > 10


def seeing(directory):
    """Return a model that sees, and requests that show it none, one or two pictures."""
    model = load(ModelOptions(model=str(directory)), directory)

    def request(count):
        media = [model.media.prepare(MediaKind.IMAGE, picture(n), bytes([n])) for n in range(count)]
        text = "".join(f"ba {medium.text} bi " for medium in media)
        token_ids = model.tokenizer.encode(f"{text}What is it?", adds_special=False)
        asked = make_request(
            f"r{count}",
            token_ids,
            max_tokens=24,
            sampling=SamplingParams(temperature=float(count % 2), seed=count, logit_bias=FEW),
            top_logprobs=2,
        )
        prompt = replace(asked.prompt, media=find_spans(token_ids, media))
        return replace(asked, prompt=prompt)

    return model, list(map(request, range(3)))


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_reply_to_pictures_is_the_same_though_it_does_not_see(
    tiny_vision_models, networks, family
):
    model, requests = seeing(tiny_vision_models(family))
    vocab = model.card.vocab_size
    expected = Driver(model.network, vocab=vocab).run(*requests)
    assert len({tuple(outcome.token_ids) for outcome in expected}) == 3
    driver = driver_of(model.network, networks("llama"), vocab=vocab)
    assert max(requests[2].prompt.token_ids) >= VOCAB
    assert_same(driver.run(*requests), expected)
    assert driver.loop.status().metrics["accepted_tokens"] > 10


def greedy(name, count, salt=0):
    return make_request(name, prompt_of(30, salt), max_tokens=count)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=5)]
)
def test_the_model_as_its_own_draft_is_nearly_always_right(networks, rows, sampling):
    network = networks("llama")
    requests = [
        make_request(f"r{n}", prompt_of(30 + 9 * n, n), max_tokens=48, sampling=sampling)
        for n in range(rows)
    ]
    expected = Driver(network).run(*requests)
    driver = driver_of(network, network)
    assert_same(driver.run(*requests), expected)
    status = driver.loop.status()
    assert status.metrics["accepted_tokens"] > 36 * rows
    assert status.metrics["accepted_tokens"] > 0.95 * status.metrics["drafted_tokens"]


def test_its_passes_replace_those_of_the_model(networks):
    network = CountingNetwork(networks("llama"))
    driver_of(network, networks("llama")).run(greedy("a", 200))
    assert network.passes < 40


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.one_in(2)
def test_it_is_the_same_while_rows_come_go_and_pause(networks, family):
    network, requests = networks(family), requests_of_one_prefix(4, 11, 60)
    # All at once; that each gets them alone too is in test_loop and test_speculation.
    plain = Driver(network)
    plain.run(*requests)
    expected = {name: outcome.token_ids for name, outcome in plain.outcomes.items()}
    budget = room_for(network, 300, rows=3)
    driver = driver_of(network, networks("llama"), speculation="auto", max_kv_bytes=budget)
    require_same_as_they_come_and_go(driver, requests, expected)
    assert driver.loop.status().metrics["accepted_tokens"] > 10


def test_a_grammar_cuts_what_it_drafts(networks):
    network = networks("llama")
    request = make_request(
        "a", prompt_of(20), max_tokens=60, grammar=Cycle(range(10, 30), 40), stop=[1]
    )
    free = greedy("b", 60, 1)
    alone = Driver(network).run(free)[0]
    outcome, other = driver_of(network, network).run(request, free)
    assert outcome.token_ids == [*(10 + n % 20 for n in range(40)), 1]
    assert other.token_ids == alone.token_ids


def test_a_request_bounds_its_drafts(networks):
    class Widths(WrappedNetwork):
        widest = 0

        def __call__(self, inputs, cache):
            if inputs.shape[1] < 20:
                self.widest = max(self.widest, inputs.shape[1])
            return super().__call__(inputs, cache)

    network = Widths(networks("llama"))
    request = make_request("a", prompt_of(30), max_tokens=60, max_draft_tokens=3)
    driver_of(network, networks("llama")).run(request)
    assert network.widest == 4


def test_a_draft_model_that_fails_is_left_out_and_costs_no_reply(networks, caplog):
    class Failing(WrappedNetwork):
        passes = 0

        def __call__(self, inputs, cache):
            self.passes += 1
            if self.passes > 40:
                raise RuntimeError("out of memory")
            return super().__call__(inputs, cache)

    network = networks("llama")
    requests = [greedy("a", 80), greedy("b", 60, 1)]
    expected = Driver(network).run(*requests)
    driver = driver_of(network, Failing(network))
    assert_same(driver.run(*requests), expected)
    assert driver.loop.status().metrics["accepted_tokens"] > 5
    assert caplog.text.count("the draft model fails, and drafts no more") == 1


def test_one_with_a_smaller_vocabulary_reads_what_it_does_not_know(networks):
    class Narrow(WrappedNetwork):
        def __call__(self, inputs, cache):
            assert mx.max(inputs).item() < VOCAB // 2
            return super().__call__(inputs, cache)[..., : VOCAB // 2]

    network = networks("llama")
    draft = replace(draft_of(Narrow(network)), model=model_of(Narrow(network), VOCAB // 2))
    requests = requests_of(3, 3)
    expected = Driver(network).run(*requests)
    driver = Driver(network, draft=draft, pass_seconds=FREE, speculation="draft")
    assert_same(driver.run(*requests), expected)
    assert driver.loop.status().metrics["drafted_tokens"] > 10


class Clocked(WrappedNetwork):
    """A network whose passes take as long as it says, on a clock of the test."""

    def __init__(self, network, clock, seconds):
        super().__init__(network)
        self.clock, self.seconds, self.passes = clock, seconds, 0

    def __call__(self, inputs, cache):
        self.passes += 1
        self.clock.now += self.seconds(inputs.size)
        return super().__call__(inputs, cache)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def clocked_s(network, draft, seconds, draft_s, *, rows, crowds, measured=None):
    """Return the seconds in which crowds of so many rows are decoded, and the draft model."""
    clock = Clock()
    drafted = draft and Clocked(draft, clock, draft_s)
    network = Clocked(network, clock, seconds)
    model = drafted and draft_of(drafted, free=False)
    driver = Driver(
        network,
        draft=model and replace(model, fresh_caches=priced(model.fresh_caches, measured or FREE)),
        pass_seconds=measured or FREE,
        learns_costs=True,
        speculation="draft",
    )
    batch = driver.loop.batch
    batch.clock = clock
    if drafted:
        batch.drafting.source.model.clock = clock
    for start in range(crowds):
        driver.run(
            *(make_request(f"r{start}-{n}", prompt_of(20, n), max_tokens=200) for n in range(rows))
        )
    return clock.now, drafted


def priced(fresh_caches, seconds):
    return replace(fresh_caches, plan=replace(fresh_caches.plan, pass_seconds=seconds))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.one_in(2)
def test_a_wrong_draft_model_is_hardly_asked_whatever_was_measured_at_load(networks, rows):
    def seconds(tokens):
        return 1.0 + 0.1 * tokens

    network, other = networks("llama"), networks("qwen3")
    plain_s, _ = clocked_s(network, None, seconds, None, rows=rows, crowds=3)
    for draft_s in (0.1, 1.0):
        drafted_s, draft = clocked_s(
            network,
            other,
            seconds,
            lambda tokens, s=draft_s: s * seconds(tokens),
            rows=rows,
            crowds=3,
        )
        assert draft.passes > 3
        # It may lose 8 passes, and then 1.5 % of the time; the first of each width look like
        # delays.
        assert drafted_s < 1.02 * plain_s + 30 * seconds(rows)


def test_a_right_draft_model_is_asked_whatever_was_measured_at_load(networks):
    def seconds(tokens):
        return 1.0 + 0.02 * tokens

    network = networks("llama")
    plain_s, _ = clocked_s(network, None, seconds, None, rows=2, crowds=2)
    drafted_s, _ = clocked_s(
        network, network, seconds, lambda _: 0.05, rows=2, crowds=2, measured={1: 5.0}
    )
    assert drafted_s < 0.5 * plain_s


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mamba2", "qwen3_5", "kimi_linear"])
def test_one_that_cannot_go_back_is_refused_by_name(networks, family):
    model = model_of(networks(family))
    named = replace(model, card=replace(model.card, path="/models/draft"))
    with pytest.raises(
        UnsupportedModelError, match=r"/models/draft .*cannot draft: it has windows"
    ):
        look_at_draft(named, range(VOCAB), batches=True)


def test_its_caches_are_part_of_what_a_row_reserves(networks):
    network = networks("llama")
    profile = draft_of(network).profile
    both = replace(profile, draft=profile)
    assert both.row_bytes(100) == 2 * profile.row_bytes(100)
    assert both.batch_bytes([100, 200], [50, 0]) == profile.batch_bytes(
        [100, 200], [50, 0]
    ) + profile.batch_bytes([100, 200])
    assert both.max_tokens(both.row_bytes(700)) == 700
