"""Sampling from a vocabulary so large that only parts of it are looked at."""

import json

import pytest
from serving import require_same, served, spoken, stream

from backend.pb import backend_pb2 as pb
from scripts.tiny_models import build_llama

pytestmark = pytest.mark.mlx

VOCAB = 20_480
# The host's defaults, others that look at more tokens, and one with penalties.
SAMPLED = (
    spoken(Temperature=0.9, TopK=40, TopP=0.95, Seed=3),
    spoken(Temperature=1.0, TopK=600, Seed=4),
    spoken(Temperature=1.0, TopK=5, MinP=0.1, Seed=5),
    spoken(Temperature=0.7, TopK=20, TopP=0.8, PresencePenalty=1.5, Penalty=1.1, Seed=6),
    spoken(Temperature=1.0, TopP=0.9, Seed=7),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large-vocabulary")
    return build_llama(directory, hidden=64, layers=2, vocab=VOCAB)


async def test_a_seed_writes_the_same_alone_and_among_rows_that_look_at_more_tokens(model):
    async with served(model) as backend:
        replies = await require_same(backend, SAMPLED)
        assert len({reply.message for reply in replies}) == len(SAMPLED)


async def test_the_likeliest_tokens_are_listed_in_order_and_a_greedy_reply_takes_the_first(model):
    request = pb.PredictOptions(Prompt="ba be bi", Tokens=24, IgnoreEOS=True, TopLogprobs=7)
    request.Logprobs = 7
    async with served(model) as backend:
        reply = await stream(backend.stub, request)
    listed = [entry for each in reply.replies if each.logprobs for entry in entries(each)]
    assert len(listed) == 24
    for entry in listed:
        best = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(best) == 7
        assert best == sorted(best, reverse=True)
        assert best[0] == entry["logprob"]


def entries(reply):
    return json.loads(reply.logprobs)["content"]


async def test_seed_0_writes_the_same_again_and_a_negative_seed_something_else(model):
    async with served(model) as backend:
        again = [await stream(backend.stub, spoken(Temperature=1.0, Seed=0)) for _ in range(2)]
        fresh = [await stream(backend.stub, spoken(Temperature=1.0, Seed=-1)) for _ in range(2)]
    assert again[0].message == again[1].message
    assert len({reply.message for reply in (again[0], *fresh)}) == 3
