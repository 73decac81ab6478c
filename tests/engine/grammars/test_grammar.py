"""Rows that follow a grammar, in any batch."""

import numpy as np
import pytest
from engine_driver import VOCAB, Driver, make_request, prompt_of
from wrapped_network import WrappedNetwork

from backend.core.request import SamplingParams
from backend.core.step import FinishReason
from backend.errors import GrammarError

pytestmark = pytest.mark.mlx

END = 1


class Sequence:
    """A grammar of fixed sets of tokens, one per place, then the end."""

    def __init__(self, *places, breaks_at=None):
        self.places = [*places, {END}]
        self.breaks_at = breaks_at
        self.made = 0

    def matcher(self):
        self.made += 1
        return SequenceMatcher(self.places, self.breaks_at)


class SequenceMatcher:
    def __init__(self, places, breaks_at):
        self.places = places
        self.breaks_at = breaks_at
        self.taken = []
        self.error = None

    def consume(self, token_id):
        allowed = self.places[min(len(self.taken), len(self.places) - 1)]
        self.taken.append(token_id)
        if len(self.taken) == self.breaks_at:
            self.error = "dead end"
        return token_id in allowed

    def fill_mask(self, row):
        row[:] = 0
        for token_id in self.places[min(len(self.taken), len(self.places) - 1)]:
            row[token_id // 32] |= np.int32(np.uint32(1 << token_id % 32).view(np.int32))


def guided(name, grammar, **options):
    sampling = options.pop("sampling", SamplingParams(temperature=1.0, seed=len(name)))
    return make_request(
        name, prompt_of(9 + len(name)), grammar=grammar, sampling=sampling, stop=[END], **options
    )


def places(seed, count=8):
    rng = np.random.default_rng(seed)
    return [set(map(int, rng.integers(2, VOCAB, 3))) for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gpt_oss"])
def test_rows_follow_their_own_grammars_beside_free_ones(networks, family):
    grammars = [Sequence(*places(seed, count=4 + seed)) for seed in range(4)]
    requests = [guided(f"g{'x' * i}", g, max_tokens=40) for i, g in enumerate(grammars)]
    free = [make_request(f"f{i}", prompt_of(30, salt=i), max_tokens=9) for i in range(3)]
    alone = [Driver(networks(family)).run(request)[0].token_ids for request in (*requests, *free)]
    outcomes = Driver(networks(family)).run(*requests, *free)
    assert [outcome.token_ids for outcome in outcomes] == alone
    for grammar, outcome in zip(grammars, outcomes, strict=False):
        assert outcome.finish is FinishReason.STOP
        pairs = zip(outcome.token_ids, grammar.places, strict=True)
        assert all(token in allowed for token, allowed in pairs)


def test_a_bias_cannot_lead_out_of_a_grammar(networks):
    grammar = Sequence({5, 6}, {7})
    sampling = SamplingParams(logit_bias={9: 100.0, 6: 50.0})
    outcome = Driver(networks("llama")).run(guided("a", grammar, sampling=sampling))[0]
    assert outcome.token_ids == [6, 7, END]


def test_logprobs_are_those_of_the_model_and_not_of_the_mask(networks):
    outcome = Driver(networks("llama")).run(guided("a", Sequence({5}), top_logprobs=2))[0]
    first = outcome.logprobs[0]
    assert -50.0 < first.logprob < -0.1
    assert first.top[0][0] != 5


def test_a_grammar_cut_off_at_the_limit_ends_by_length(networks):
    outcome = Driver(networks("llama")).run(guided("a", Sequence(*places(1)), max_tokens=3))[0]
    assert outcome.finish is FinishReason.LENGTH
    assert len(outcome.token_ids) == 3


def test_a_grammar_at_a_dead_end_fails_its_request_alone(networks):
    broken = guided("broken", Sequence(*places(2), breaks_at=3), max_tokens=40)
    others = [guided("ok", Sequence(*places(3))), make_request("free", prompt_of(20))]
    outcomes = Driver(networks("llama")).run(broken, *others)
    assert isinstance(outcomes[0].error, GrammarError)
    assert "dead end" in str(outcomes[0].error)
    assert [outcome.error for outcome in outcomes[1:]] == [None, None]


def test_a_grammar_that_can_go_no_further_behind_the_end_fails_nothing(networks):
    last = guided("last", Sequence({5}, {6}, breaks_at=3))
    outcome, _ = Driver(networks("llama")).run(last, make_request("other", prompt_of(20)))
    assert (outcome.finish, outcome.error) == (FinishReason.STOP, None)
    assert outcome.token_ids == [5, 6, END]


def test_a_guided_row_that_is_prefilled_again_goes_on_in_its_grammar(networks):
    network = networks("llama")

    class FailsOnce(WrappedNetwork):
        def __init__(self):
            super().__init__(network)
            self.calls = 0

        def __call__(self, inputs, cache):
            self.calls += inputs.shape[0] == 2
            if self.calls == 4:
                self.calls += 1
                raise RuntimeError("once")
            return network(inputs, cache=cache)

    grammars = [Sequence(*places(seed)) for seed in (4, 5)]
    requests = [guided(f"g{'x' * i}", g, max_tokens=40) for i, g in enumerate(grammars)]
    alone = [Driver(network).run(request)[0].token_ids for request in requests]
    outcomes = Driver(FailsOnce()).run(*requests)
    assert [outcome.token_ids for outcome in outcomes] == alone
    assert all(grammar.made > 2 for grammar in grammars)


class BrokenMatcher(SequenceMatcher):
    def fill_mask(self, row):
        if len(self.taken) == self.breaks_at:
            raise RuntimeError("no mask")
        super().fill_mask(row)


class Broken(Sequence):
    """A grammar that has no mask for one of its places."""

    def matcher(self):
        return BrokenMatcher(self.places, self.breaks_at)


@pytest.mark.parametrize("max_tokens", range(2, 10))
def test_a_mask_that_cannot_be_found_costs_the_others_no_token(networks, max_tokens):
    plain = [make_request(f"p{i}", prompt_of(20 + i, i), max_tokens=max_tokens) for i in range(2)]
    alone = [Driver(networks("llama")).run(request)[0].token_ids for request in plain]
    broken = guided("broken", Broken(*places(1), breaks_at=4), max_tokens=20)
    driver = Driver(networks("llama"))
    *outcomes, failed = driver.run(*plain, broken)
    assert [outcome.token_ids for outcome in outcomes] == alone
    assert all(outcome.finish is FinishReason.LENGTH for outcome in outcomes)
    assert "no mask" in str(failed.error)
    assert driver.loop.status().requests == ()
