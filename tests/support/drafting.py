"""Requests to compare with drafts and without, and the comparison of their results."""

import random
from dataclasses import replace

import mlx.core as mx
import pytest
from engine_driver import Driver, FixedCosts, make_request, model_of, prompt_of

from backend.config import ModelOptions
from backend.core.request import SamplingParams
from backend.engine.trials.draft_model import LoadedHead, look_at_draft, look_at_reader
from backend.model.heads import HeadNetwork, HiddenTap, build_head, head_alone, head_beside
from backend.model.loader import load

# Passes of any width cost the same: whatever may be right is drafted.
FREE = {1: 1.0, 64: 1.0}
# Replies of so few tokens repeat themselves: many drafts are right, and many nearly are.
FEW = dict.fromkeys((5, 9), 60.0)
# How many rows there are, and the seeds of `requests_of`: together they have every sampling.
CROWDS = [(1, (4, 5)), (4, (0,))]


class Free(FixedCosts):
    """Passes that cost nothing: whatever is likely to be right is drafted."""

    def of(self, _rows, _width):
        return 0.0


class FreeHead(LoadedHead):
    def batch(self, vocab_size):
        batch = super().batch(vocab_size)
        batch.costs = Free(FREE)
        return batch


def head_pair(directory, head_directory):
    """Return the network of a directory, and the head of this or another, which drafts for free."""
    network = load(ModelOptions(model=str(directory)), directory, renders=False).network
    kind = head_alone(head_directory) or head_beside(head_directory)
    head = build_head(kind, head_directory, network)
    mx.eval(head.state)
    part = model_of(head)
    if isinstance(head, HeadNetwork):
        look = look_at_draft(part, range(60), batches=True)
    else:
        look = look_at_reader(part, head)
    tap = HiddenTap(head.tapped)
    return network, FreeHead(look.model, look.fresh_caches, look.profile, tap)


def head_driver(pair, **options):
    """Return a driver that drafts by a head alone."""
    network, head = pair
    return Driver(network, draft=head, **{"pass_seconds": FREE, "speculation": "mtp", **options})


def samplings(seed):
    """Return one of each kind: greedy, drawn, penalised over all and over a window, filtered."""
    return [
        SamplingParams(),
        SamplingParams(temperature=0.3, seed=seed),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.01),
        SamplingParams(temperature=0.2, seed=seed, frequency_penalty=0.2, penalty_window=5),
        SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=seed),
        SamplingParams(temperature=1.5, min_p=0.1, seed=seed),
    ]


def requests_of_one_prefix(seed, count, longest):
    """Return requests whose prompts begin with parts of one; so many tokens follow at most.

    None has a limit of its own: where memory is short they pause.
    """
    rng, shared = random.Random(seed), prompt_of(70)
    return [
        make_request(
            f"r{n}",
            [*shared[: rng.randint(8, 70)], *prompt_of(rng.randint(1, longest), n)],
            max_tokens=rng.randint(5, 50),
            is_open_ended=True,
            sampling=replace(samplings(n)[n % 6], logit_bias=FEW),
        )
        for n in range(count)
    ]


def require_same_as_they_come_and_go(driver, requests, expected):
    """Compare replies with the tokens expected; requests come by and by, and some are cancelled."""
    rng = random.Random(len(requests))
    left, cancelled = list(requests), set()
    while left or not driver.loop.is_idle or driver.loop.status().metrics["waiting"]:
        if left and rng.random() < 0.3:
            driver.loop.requests.submit(left.pop())
        running = [r for r in requests if driver.outcome(r).token_ids]
        if running and rng.random() < 0.05:
            request = rng.choice(running)
            if driver.outcome(request).finish is None:
                cancelled.add(request.request_id)
                driver.loop.requests.cancel(request.request_id)
        driver.turn()
    for name, tokens in expected.items():
        found = driver.outcomes[name].token_ids
        assert found == tokens[: len(found)]
        assert name in cancelled or found == tokens
    assert cancelled


def requests_of(seed, count, longest=40):
    """Return requests of all kinds, whose replies have half as many tokens to that many."""
    rng = random.Random(seed)
    return [
        make_request(
            f"r{seed}-{n}",
            prompt_of(rng.randint(3, 90), n),
            max_tokens=rng.randint(longest // 2, longest),
            sampling=replace(
                samplings(n)[(seed + n) % 6], logit_bias=FEW if rng.random() < 0.8 else {}
            ),
            stop=[7, 9] if rng.random() < 0.2 else [],
            top_logprobs=3 if n % 2 else None,
        )
        for n in range(count)
    ]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish is other.finish
        assert one.error is other.error is None
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)


class Cycle:
    """A grammar of one text: a cycle of tokens, then the end."""

    def __init__(self, tokens, count):
        self.tokens = [tokens[n % len(tokens)] for n in range(count)]

    def matcher(self):
        return CycleMatcher(self.tokens)


class CycleMatcher:
    error = None
    may_force = True

    def __init__(self, tokens):
        self._tokens = [*tokens, 1]
        self._place = 0

    def consume(self, token_id):
        self._place += 1
        return token_id == self._tokens[self._place - 1]

    def step_back(self, count):
        self._place -= count

    def forced(self):
        return self._tokens[self._place :]

    def count_allowed(self, token_ids):
        pairs = zip(token_ids, self.forced(), strict=False)
        wrong = (n for n, (a, b) in enumerate(pairs) if a != b)
        return next(wrong, min(len(token_ids), len(self.forced())))

    def fill_mask(self, row):
        row[:] = 0
        if self._place < len(self._tokens):
            token_id = self._tokens[self._place]
            row[token_id // 32] |= 1 << token_id % 32
