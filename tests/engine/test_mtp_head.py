"""An MTP head changes no reply, and is right where it knows the model."""

import random
from dataclasses import replace

import mlx.core as mx
import pytest
from drafting import FEW, FREE, Free, assert_same, model_of, requests_of, samplings
from engine_driver import Driver, make_request, prompt_of, room_for

from backend.core.request import SamplingParams
from backend.engine.passes.row_states import MOST_TOKENS, RowStates
from backend.engine.trials.draft_model import look_at_draft
from backend.engine.trials.mtp_head import LoadedHead
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.mtp_head import HiddenTap, build_head
from scripts.mtp_head import add_head
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx

FAMILIES = ("qwen3_5", "qwen3_next")


class FreeHead(LoadedHead):
    def batch(self, vocab_size):
        batch = super().batch(vocab_size)
        batch.costs = Free(FREE)
        return batch


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return a network, and a head for it that is always right or hardly ever."""
    made = {}

    def pair(family, *, is_right=False):
        if (family, is_right) not in made:
            directory = tmp_path_factory.mktemp(family)
            build(family, directory)
            add_head(directory, directory / "head", is_right=is_right)
            network, _ = import_mlx_lm().load_model(directory)
            head = build_head(directory / "head", network, None)
            look = look_at_draft(model_of(head), range(60), batches=True)
            made[family, is_right] = network, look, HiddenTap(network)
        network, look, tap = made[family, is_right]
        return network, FreeHead(look.model, look.fresh_caches, look.profile, tap)

    return pair


def driver_of(pair, **options):
    """Return a driver that drafts by the head alone."""
    network, head = pair
    return Driver(network, draft=head, **{"pass_seconds": FREE, "speculation": "mtp", **options})


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_reply_is_the_same_whether_the_head_is_right_or_not(pairs, family, rows, is_right):
    pair, drafted = pairs(family, is_right=is_right), 0
    for seed in range(2):
        requests = requests_of(seed, rows)
        expected = Driver(pair[0]).run(*requests)
        driver = driver_of(pair)
        assert_same(driver.run(*requests), expected)
        drafted += driver.session.status().drafted_tokens
    assert drafted > 10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=5)]
)
def test_a_head_that_knows_the_model_is_nearly_always_right(pairs, rows, sampling):
    pair = pairs("qwen3_5", is_right=True)
    requests = [
        make_request(f"r{n}", prompt_of(30 + 9 * n, n), max_tokens=90, sampling=sampling)
        for n in range(rows)
    ]
    expected = Driver(pair[0]).run(*requests)
    driver = driver_of(pair)
    assert_same(driver.run(*requests), expected)
    status = driver.session.status()
    assert status.accepted_tokens > 60 * rows
    assert status.accepted_tokens > 0.95 * status.drafted_tokens
