"""Families whose attention knows only one row: it runs row by row, and all else together."""

import json
from functools import cache

import mlx.core as mx
import pytest
from engine_driver import Driver, make_request, prompt_of
from mlx_vlm.utils import load_model
from whole_trial import WholeTrial, batch_plan

from backend.core.prompt import Prompt
from backend.core.scoring import ScoreRequest
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.agreement import Ranks
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Batching, BatchPlan
from backend.engine.trials.trial_steps import trial_lengths
from backend.model.checkpoint.config_file import attention_spans
from backend.model.checkpoint.mends import mend
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.vision.vision_network import VisionNetwork
from scripts.sweep.text_models import build_text_model
from scripts.sweep.vision_models import build_vision_model

pytestmark = pytest.mark.mlx

FAMILIES = ["deepseek_v41", "llama4", "llama4 that sees", "minimax_m3_vl", "z1t"]
TOKENS = [(7 * i * i + 3 * i) % 94 for i in range(60)]
BY_ROW = BatchPlan(Batching.BY_ROW, starts_early=True)
ALONE = BatchPlan(Batching.NONE)
# Beyond the windows, blocks and chunks, and out of step with them; one has nothing to prefill.
VOCAB = 320
LENGTHS = (3, 45, 70, 101, 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a function that returns a network, mended or not, and its spans."""
    directory = tmp_path_factory.mktemp("families")

    @cache
    def build(family, *, mended=True):
        name, sees = family.split()[0], "sees" in family
        path = directory / family
        if not path.exists():
            (build_vision_model if sees else build_text_model)(name, path)
        sees = sees or name == "z1t"
        model = load_model(path) if sees else import_mlx_lm().load_model(path)[0]
        if mended:
            mend(model)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return VisionNetwork(model) if sees else model, attention_spans(config)

    return build


@pytest.fixture(params=FAMILIES)
def network(request, built):
    return built(request.param)[0]


@pytest.fixture(scope="module")
def alone():
    """Return a function that returns the tokens that each request gets alone, computed once."""
    found = {}

    def tokens(network):
        if id(network) not in found:
            found[id(network)] = tokens_of(driver_of(network, ALONE).run(*requests()))
        return found[id(network)]

    return tokens


def driver_of(network, plan):
    return Driver(network, plan=plan, batches=plan.batches, vocab=VOCAB)


def plan_of(network, spans, **options):
    return batch_plan(network, CacheFactory(network), TOKENS, trial_lengths(spans), **options)


def text_of(length, salt=0):
    return [token_id % 94 for token_id in prompt_of(length, salt)]


def requests():
    """Return requests whose replies end one after another, the shortest prompt's last."""
    return [
        make_request(f"r{n}", text_of(length, n), max_tokens=36 - 6 * n)
        for n, length in enumerate(LENGTHS)
    ]


def tokens_of(outcomes):
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trial_finds_that_their_attention_must_run_row_by_row(built, family):
    """Upstream contract: when the first line fails, the family can be batched without a mend."""
    assert not plan_of(*built(family, mended=False)).batches
    assert plan_of(*built(family)).batching is Batching.BY_ROW


def test_ranks_run_no_rows_apart(built):
    """Stages of a pipeline tie the arrays that they have sent to the cache of one row."""
    ranks = Ranks(lambda value: (value, value))
    assert not plan_of(*built("llama4"), ranks=ranks).batches


@pytest.mark.one_in(2)
def test_rows_that_join_and_leave_get_the_tokens_that_they_get_alone(network, alone):
    driver = driver_of(network, BY_ROW)
    assert tokens_of(driver.run(*requests())) == alone(network)
    assert max(map(len, driver.desk.passes)) == len(LENGTHS)


@pytest.mark.one_in(2)
def test_a_row_that_is_cancelled_leaves_the_others_as_they_are(network, alone):
    first, *rest = requests()
    driver = driver_of(network, BY_ROW)
    for request in (first, *rest):
        driver.loop.requests.submit(request)
    while len(driver.outcome(rest[-1]).token_ids) < 4:
        driver.turn()
    driver.loop.requests.cancel(first.request_id)
    while not driver.loop.is_idle:
        driver.turn()
    assert tokens_of(map(driver.outcome, rest)) == alone(network)[1:]


@pytest.mark.one_in(2)
def test_continuations_are_scored_together_as_alone(network):
    continuations = ((5, 9, 40, 7), (6, 3), (8, 8, 8, 8, 8, 8), (1,))
    score = ScoreRequest(
        request_id="s", prompt=Prompt(tuple(text_of(40))), continuations=continuations
    )
    found = []
    for plan in (BY_ROW, ALONE):
        driver = driver_of(network, plan)
        number = driver.begin(score)
        while not driver.loop.is_idle:
            driver.turn()
        found.append([list(each) for each in driver.result(number).logprobs])
    for together, alone in zip(*found, strict=True):
        assert together == pytest.approx(alone, abs=1e-3)


def test_rows_give_drafts_back_if_their_caches_keep_every_position(built):
    network, spans = built("minimax_m3_vl")
    rows = WholeTrial(network, CacheFactory(network), TOKENS, trial_lengths(spans))
    assert rows.fault(BY_ROW, width=4) is None
    network, spans = built("llama4")
    rows = WholeTrial(network, CacheFactory(network), TOKENS, trial_lengths(spans))
    assert "keep what they have taken" in rows.fault(BY_ROW, width=4)


def test_an_idle_device_begins_with_no_row_that_has_no_keys_yet(built):
    network, _ = built("llama4 that sees")
    rows = [network.make_cache(), network.make_cache()]
    network(mx.array([text_of(9)]), cache=rows[0])
    batch = BatchCaches(BY_ROW)
    batch.regroup([], rows)
    assert batch.layers[0].empty()
    together = batch.forward(network, mx.array([[7], [5]]), is_idle=True)
    assert mx.allclose(together[1], network(mx.array([[5]]), cache=network.make_cache())[0])
