import importlib
import json
import math

import mlx.core as mx
import pytest
from engine_driver import VOCAB
from mlx_vlm.utils import load_model
from whole_trial import WholeTrial, batch_plan

from backend.engine.passes.agreement import OtherRankError, Ranks
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Batching, BatchPlan
from backend.engine.trials.trial_steps import (
    difference,
    require_sense,
    trial_lengths,
)
from backend.errors import LoadError
from backend.model.checkpoint.config_file import attention_spans
from backend.model.checkpoint.mends import mend
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.vision.vision_network import VisionNetwork
from scripts.sweep.text_models import build_text_model, text_config
from scripts.sweep.vision_models import build_vision_model
from scripts.tiny_models import FAMILIES

pytestmark = pytest.mark.mlx


TOKENS = [(7 * i * i + 3 * i) % 94 for i in range(60)]


def trial(network, **options):
    return WholeTrial(network, CacheFactory(network), TOKENS, **options)


def fault(network, **options):
    return trial(network, **options).fault(BatchPlan(Batching.PADDED))


def plan(network):
    return batch_plan(network, CacheFactory(network), TOKENS)


RAGGED = dict.fromkeys(FAMILIES, Batching.RAGGED)
EXPECTED = RAGGED | {
    "deepseek_v3": Batching.LATENT,
    "kimi_linear": Batching.LATENT,
    "deepseek_v32": Batching.PADDED,  # its indexer reads the keys that it fetches
    "llama4": Batching.BY_ROW,  # its caches cannot be merged
}


@pytest.mark.parametrize(("family", "expected"), EXPECTED.items())
def test_every_family_gets_the_best_batches_that_it_can_have(networks, family, expected):
    assert plan(networks(family)).batching is expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_of_their_own_length_use_stored_prefixes_in_place_if_they_have_keys(networks, family):
    found = plan(networks(family))
    has_keys = family != "mamba2"
    assert found.shares_prefixes == (has_keys and found.batching is Batching.RAGGED)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "mamba2"])
def test_families_batch_with_the_caches_of_mlx_lm_too(networks, family):
    assert fault(networks(family)) is None


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "llama_wide", "deepseek_v3"])
def test_rows_take_several_tokens_in_a_pass_and_give_some_back(networks, family, width):
    rows = trial(networks(family))
    for overhead in (0.0, 10.0, math.inf):
        assert rows.fault(BatchPlan(EXPECTED[family], overhead), width=width) is None
    assert rows.fault(BatchPlan(Batching.PADDED), width=width) is None


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mamba2", "qwen3_next"])
def test_rings_and_states_go_back_too(networks, family):
    rows = trial(networks(family))
    assert rows.fault(BatchPlan(), width=4) is None
    assert not rows.keeps_positions


def test_caches_of_chunks_keep_what_they_have_taken(networks):
    rows = trial(networks("llama4"))
    assert "keep what they have taken" in rows.fault(BatchPlan(), width=2, rows=[0])


def test_pools_go_back_and_projections_are_kept_by_row(tmp_path):
    """Upstream contract: it takes kept projections for those of other rows, as of mlx-vlm 0.7."""
    model = load_model(build_vision_model("glm5_next", tmp_path))
    lengths = trial_lengths({32})
    assert "differ" in trial(VisionNetwork(model), lengths=lengths).fault(PADDED, width=9)
    mend(model)
    for each in (lengths, (4, 5, 6)):
        rows = trial(VisionNetwork(model), lengths=each)
        for width in (1, 3, 8, 9, 12):
            assert rows.fault(PADDED, width=width) is None
        assert rows.fault(PADDED, width=9, rows=[0]) is None
    assert not rows.keeps_positions


PADDED = BatchPlan(Batching.PADDED)


def test_caches_without_merge_are_told():
    import_mlx_lm()

    class Unmergeable:
        state = ()

    class Network:
        layers = ()

        def make_cache(self):
            return [Unmergeable()]

        def __call__(self, inputs, cache):  # noqa: ARG002
            return mx.zeros((*inputs.shape, VOCAB))

    assert "Unmergeable cannot be merged" in fault(Network())


class SwappingNetwork:
    """Answers each row of a batch with another row's logits."""

    def __init__(self, network):
        self._network = network
        self.layers = network.layers

    def __call__(self, inputs, cache):
        return self._network(inputs, cache=cache)[::-1]


def test_a_model_that_mixes_rows_up_is_told(networks):
    assert "differ" in fault(SwappingNetwork(networks("llama")))


class RaisingNetwork(SwappingNetwork):
    def __call__(self, inputs, cache):
        if inputs.shape[0] > 1:
            raise ValueError("no batches, please")
        return self._network(inputs, cache=cache)


def test_a_model_that_raises_in_a_batch_is_told(networks):
    assert "no batches, please" in fault(RaisingNetwork(networks("llama")))


def test_what_is_no_number_is_not_what_should_have_been_computed():
    numbers = mx.array([[1.0, 2.0, -mx.inf]])
    for wrong in ([[1.0, mx.nan, -mx.inf]], [[1.0, -mx.inf, 2.0]], [[1.0, 2.0, 0.0]]):
        assert "differ by inf" in difference([numbers, numbers], [numbers, mx.array(wrong)])
        assert "differ by inf" in difference([numbers, numbers], [mx.array(wrong), numbers])
    assert difference([numbers], [numbers]) is None


def test_a_pass_that_another_rank_cannot_build_is_not_computed():
    others = Ranks(lambda value: (value, 1.0))
    with pytest.raises(OtherRankError):
        others.attempt(lambda: mx.zeros(1))


class WithAnother:
    """Shares its passes with a rank that cannot compute batches."""

    def __init__(self, network):
        self._network = network
        self.layers = network.layers
        self.other_fails = False

    def __call__(self, inputs, cache):
        self.other_fails = inputs.shape[0] > 1
        return self._network(inputs, cache=cache)

    def exchange(self, value):
        return value, float(self.other_fails)


def test_what_one_rank_cannot_batch_none_does(networks):
    network = WithAnother(networks("llama"))
    caches, ranks = CacheFactory(network), Ranks(network.exchange)
    assert batch_plan(network, caches, TOKENS, ranks=ranks).batching is Batching.NONE


def test_gemma2_breaks_in_a_batch_until_its_masks_are_mended():
    """Upstream contract: when this fails, mlx-lm has mended it and the mend may go."""
    import_mlx_lm()
    module = importlib.import_module("mlx_lm.models.gemma2")
    mx.random.seed(0)
    network = module.Model(
        module.ModelArgs(
            model_type="gemma2",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            head_dim=16,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            num_key_value_heads=2,
        )
    )
    assert fault(network) is not None
    mend(network)
    assert fault(network) is None


def test_the_batches_of_minimax_m3_are_wrong_only_beyond_its_blocks(tmp_path):
    """Upstream contract: it cuts blocks of keys over padding, as of mlx-lm 0.32."""
    directory = build_text_model("minimax_m3_vl", tmp_path)
    network, _ = import_mlx_lm().load_model(directory)
    spans = attention_spans(text_config("minimax_m3_vl"))
    assert spans == {8, 4 * 8}
    assert fault(network) is None
    assert "differ" in fault(network, lengths=trial_lengths(spans))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_are_crossed_and_batch_correctly(networks, family):
    rows = trial(networks(family), lengths=(4, 40, 59))
    assert rows.ragged_fault(Batching.RAGGED) is None
    assert rows.fault(BatchPlan(Batching.PADDED)) is None


def test_the_batches_of_qwen4_exp_are_wrong_beyond_its_budget_until_it_is_mended(tmp_path):
    """Upstream contract: it attends to all blocks of padded rows, as of mlx-vlm 0.7."""
    directory = build_vision_model("qwen4_exp", tmp_path)
    spans = attention_spans(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    assert spans == {64}
    model = load_model(directory)
    lengths = trial_lengths(spans)
    assert fault(VisionNetwork(model)) is None
    assert "differ" in fault(VisionNetwork(model), lengths=lengths)
    mend(model)
    rows = trial(VisionNetwork(model), lengths=lengths)
    assert rows.fault(BatchPlan(Batching.PADDED)) is None
    assert "pads its rows" in rows.ragged_fault(Batching.RAGGED)


@pytest.mark.parametrize("spans", [{24}, {8, 32}, {2048, 64}, {3}])
def test_trial_lengths_reach_beyond_every_span_and_are_divided_by_none(spans):
    _, *long = trial_lengths(spans)
    assert min(long) > max(spans)
    assert all((long[1] - long[0]) % span for span in spans)


def test_the_spans_of_towers_are_not_those_of_the_text():
    config = {"sliding_window": 9, "text_config": {"chunk_size": 5, "window": None}}
    assert attention_spans({**config, "vision_config": {"window_size": 7}}) == {9, 5}


def test_rows_that_no_text_uses_do_not_make_a_model_senseless():
    """A row of zeros gives NaN in norms that divide by its length."""

    class Normless:
        layers = ()

        def __call__(self, inputs, cache):  # noqa: ARG002
            return mx.where(inputs < 2, mx.nan, inputs)[..., None] * mx.arange(VOCAB)

    require_sense(Normless(), list, [5, 6])
    with pytest.raises(LoadError, match="NaN"):
        require_sense(Normless(), list, [0, 1])


class Saying:
    """A network whose logits are a function of the token ids."""

    layers = ()

    def __init__(self, say):
        self._say = say

    def __call__(self, inputs, cache):  # noqa: ARG002
        return self._say(inputs[..., None].astype(mx.float32)) + mx.zeros(VOCAB)


@pytest.mark.parametrize(
    ("say", "problem"),
    [
        (lambda ids: ids * mx.inf, "NaN or infinity"),
        (lambda ids: mx.where(ids == 6, mx.nan, ids * mx.arange(VOCAB)), "NaN or infinity"),
        (mx.zeros_like, "every token the same chance"),
        (lambda ids: 0 * ids - mx.inf, "every token the same chance"),
        (lambda ids: 0 * ids + mx.arange(VOCAB), "the same whatever it is told"),
    ],
)
def test_a_model_that_makes_no_sense_is_told(say, problem):
    with pytest.raises(LoadError, match=problem):
        require_sense(Saying(say), list, [5, 6, 7])


def test_rows_of_the_vocabulary_may_be_ruled_out():
    """Some models say -inf for rows that fill the matrix up."""
    network = Saying(lambda ids: mx.where(mx.arange(VOCAB) > 90, -mx.inf, ids * mx.arange(VOCAB)))
    require_sense(network, list, [5, 6])
