"""How models that see are batched: their text goes through attention of mlx-vlm."""

import mlx_vlm
import pytest
from engine_driver import VOCAB
from whole_trial import WholeTrial, batch_plan

from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Batching, BatchPlan
from backend.model.vision.vision_network import VisionNetwork

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
]

FAMILIES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "smolvlm", "gemma3", "gemma4", "llava"]


@pytest.fixture(params=FAMILIES)
def network(request, tiny_vision_models):
    return VisionNetwork(mlx_vlm.load(str(tiny_vision_models(request.param)))[0])


def test_rows_of_models_that_see_have_their_own_lengths(network):
    plan = batch_plan(network, CacheFactory(network), range(VOCAB))
    assert plan.batching is Batching.RAGGED


def test_positions_of_pictures_are_given_back_with_their_rows(network):
    trial = WholeTrial(network, CacheFactory(network), range(VOCAB))
    fault = trial.fault(BatchPlan(Batching.RAGGED), width=2)
    assert fault is None or "keep what they have taken" in fault
