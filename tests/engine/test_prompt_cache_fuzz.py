"""Storms of requests on shared prefixes: whatever fails, leaves or is evicted, no token differs."""

import random
from dataclasses import replace
from functools import cache

import pytest
from engine_driver import VOCAB, Driver, make_request
from exact_network import ExactNetwork
from wrapped_network import WrappedNetwork

from backend.cache import layout
from backend.core.metric_table import nested
from backend.core.request import Remembered, SamplingParams
from backend.engine.rows.pacing import ChunkLimit, PrefillPace
from backend.errors import GenerationFailedError, RequestCancelledError
from scripts.tiny_models import FAMILIES

pytestmark = pytest.mark.mlx

MIXTURES = [
    *(("kv",), ("window",), ("pair",), ("state",)),
    *(("window", "kv"), ("kv", "state"), ("state", "window", "pair")),
]
FAILURE_RATES = (0.0, 0.003, 0.03)
ERRORS = (GenerationFailedError, RequestCancelledError, type(None))
MAX_TURNS = 20_000
# So few that unlike prompts often agree for a while.
LETTERS = 6


class Sabotaged(WrappedNetwork):
    """Fails random passes, before its caches were written to or after."""

    def __init__(self, network, rng):
        super().__init__(network)
        self._rng = rng
        self._rate = rng.choice(FAILURE_RATES)

    def __call__(self, inputs, cache):
        if inputs.tolist() == [[0]]:
            # The loop's trial of the device, after a failure.
            return super().__call__(inputs, cache)
        fate = self._rng.random()
        if fate < self._rate / 2:
            raise RuntimeError("failed before the pass")
        logits = super().__call__(inputs, cache)
        if fate < self._rate:
            raise RuntimeError("failed behind the pass")
        return logits


class RandomPacer:
    """Cuts prompts into chunks, and lets them overtake decode steps, as the dice say."""

    def __init__(self, rng):
        self._rng = rng
        self._longest = rng.choice([3, 20, 100])

    def pace(self):
        tokens = self._rng.randint(1, self._longest)
        chunk = ChunkLimit(tokens, rest=tokens)
        return PrefillPace(self._rng.random() < 0.5, shared=chunk, alone=chunk)


class Storm:
    """Random requests on one session, all from one seed."""

    def __init__(self, network, seed, *, longest_prompt=90):
        self.rng = random.Random(seed)
        self.network = network
        self.longest_prompt = longest_prompt
        self.requests = {}
        self.driver = Driver(
            Sabotaged(network, self.rng),
            max_slots=self.rng.choice([1, 2, 4, 16]),
            max_cache_bytes=int(10 ** self.rng.uniform(2, 6.5)),
        )
        self.loop = self.driver.loop
        self.pacer = RandomPacer(self.rng)
        self.driver.desk.agree = self.random_pace

    def random_pace(self, pace):
        """Have the clock allow anything."""
        return pace and replace(pace, prefill=self.pacer.pace())

    def noise(self, longest):
        return [self.rng.randrange(LETTERS) for _ in range(self.rng.randint(1, longest))]

    def prompt(self):
        """Something new after a part of something old."""
        trunk = self.text()
        cut = self.rng.choice([len(trunk), self.rng.randint(0, len(trunk))])
        end = self.noise(20) if self.rng.random() < 0.7 else []
        return [*trunk[:cut], *end][: self.longest_prompt] or [1]

    def text(self):
        """The prompt and the reply, as far as it has come, of some request."""
        if len(self.requests) < 2:
            return self.noise(self.longest_prompt)
        request = self.rng.choice(list(self.requests.values()))
        return [*request.prompt.token_ids, *self.driver.outcome(request).token_ids]

    def request(self):
        rng, tokens = self.rng, self.prompt()
        request = make_request(
            f"r{len(self.requests)}",
            tokens,
            max_tokens=rng.randint(1, 24),
            boundaries=sorted(rng.randint(0, len(tokens)) for _ in range(rng.randint(0, 4))),
            stop=rng.sample(range(VOCAB), 12),
            sampling=rng.choice([SamplingParams(), SamplingParams(temperature=1.0, seed=3)]),
            remembered=rng.choice([Remembered.ALL, Remembered.ALL, *Remembered]),
        )
        system_tokens = rng.choice([0, rng.randint(0, len(tokens))])
        return replace(request, prompt=replace(request.prompt, system_tokens=system_tokens))

    def blow(self, requests):
        while len(self.requests) < requests:
            self.submit()
            for _ in range(self.rng.choice([0, 0, 1, 3, 30])):
                self.turn()
            if self.rng.random() < 0.2:
                self.loop.requests.cancel(self.rng.choice(list(self.requests)))
            if self.rng.random() < 0.01:
                for name in self.requests:
                    self.loop.requests.cancel(name)
        turns = 0
        while not self.loop.is_idle:
            self.turn()
            turns += 1
            assert turns < MAX_TURNS, "it never comes to rest"

    def submit(self):
        request = self.request()
        self.requests[request.request_id] = request
        self.loop.requests.submit(request)

    def turn(self):
        self.driver.turn()
        assert self.held() <= {row.request_id for row in self.loop.scheduler.rows()}

    def held(self):
        return set(self.loop.prefixes.store.nodes.held)

    def outcomes(self):
        return {name: self.driver.outcome(request) for name, request in self.requests.items()}

    def finished(self):
        """Return the requests that came to their end."""
        return [self.requests[name] for name, o in self.outcomes().items() if o.finish is not None]

    def check(self):
        """See that nothing is left over and that every finished request got its tokens."""
        self.loop.check()
        assert not self.held()
        assert not self.loop.scheduler.rows()
        self.check_books()
        for outcome in self.outcomes().values():
            assert outcome.error is None or outcome.finish is None
            assert isinstance(outcome.error, ERRORS)
        finished = self.finished()
        assert len(finished) > len(self.requests) / 8
        for request, expected in zip(finished, cold(self.network, finished), strict=True):
            outcome = self.driver.outcome(request)
            assert outcome.token_ids == expected.token_ids, request.request_id
            assert outcome.finish is expected.finish

    def check_books(self):
        """Every prompt that a token followed was counted, once."""
        served = [name for name, outcome in self.outcomes().items() if outcome.token_ids]
        status = self.loop.status().metrics
        lengths = [len(self.requests[name].prompt.token_ids) for name in served]
        assert status["prompt_cache.looked_up_tokens"] == sum(lengths)
        assert sum(nested(status)["prompt_cache"]["hits"].values()) == len(served)
        assert status["prompt_cache.hit_tokens"] <= status["prompt_cache.looked_up_tokens"]


# By the id of a network, which lives as long as the process, and the request.
_COLD = {}
exact_network = cache(ExactNetwork)


def cold(network, requests):
    """Run requests alone, without a prompt cache; each once for all storms that send it."""
    keys = [(id(network), repr(request)) for request in requests]
    new = {key: request for key, request in zip(keys, requests, strict=True) if key not in _COLD}
    found = Driver(network, batches=False, max_cache_bytes=0).run(*new.values())
    _COLD.update(zip(new, found, strict=True))
    return [_COLD[key] for key in keys]


@pytest.fixture(autouse=True, params=[1, 8, 512])
def shortest_reference(request, monkeypatch):
    """Let rows use stored prefixes in place from so many tokens to a node on."""
    monkeypatch.setattr(layout, "MIN_REFERENCE_TOKENS", request.param)


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
@pytest.mark.one_in(4)
def test_a_storm_changes_no_token(mixture, seed):
    storm = Storm(exact_network(*mixture), seed)
    storm.blow(32)
    storm.check()


# Between these two there is only more bookkeeping, which storms on exact networks see.
@pytest.mark.parametrize("shortest_reference", [1, 512], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(8)
def test_a_storm_changes_no_token_of_a_real_network(networks, family):
    storm = Storm(networks(family), family, longest_prompt=70)
    storm.blow(12)
    storm.check()
