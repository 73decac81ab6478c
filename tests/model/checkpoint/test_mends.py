"""Bugs of the libraries' model code, and networks without them."""

import importlib

import mlx.core as mx
import pytest
from mlx_vlm.utils import load_model
from whole_trial import batch_plan

from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Batching
from backend.model.checkpoint.mends import mend
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.vision.vision_network import VisionNetwork
from scripts.sweep.text_models import build_text_model
from scripts.sweep.vision_models import build_vision_model
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx

WIDTH = 64


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory):
    """Return gemma3n as mlx-vlm builds it, and mended."""
    directory = build_vision_model("gemma3n", tmp_path_factory.mktemp("gemma3n"))
    plain, mended = load_model(directory), load_model(directory)
    mend(mended)
    return plain, mended


@pytest.mark.parametrize("name", ["Model", "SequenceClassificationModel"])
def test_modernbert_computes_gelu_as_it_was_trained(name):
    """Upstream contract: it takes the approximation by tanh."""
    modernbert = importlib.import_module("mlx_vlm.models.modernbert.modernbert")
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    names = {"model_type": "modernbert", "vocab_size": 8, "num_attention_heads": 2}
    config = modernbert.ModelConfig.from_dict(shape | names)
    plain, mended = (getattr(modernbert, name)(config) for _ in range(2))
    mend(mended)
    x = mx.linspace(-4, 4, 200)
    exact = x * (1 + mx.erf(x / 2**0.5)) / 2
    for theirs, ours in zip(_activations(plain), _activations(mended), strict=True):
        assert mx.abs(theirs(x) - exact).max() > 1e-4
        assert mx.abs(ours(x) - exact).max() < 1e-6


def _activations(network):
    return [module.act for module in network.modules() if "act" in module]


def logits_of(network, **given):
    return network.language_model(cache=network.make_cache(), **given).logits


def test_gemma3n_reads_an_embedded_prompt_as_it_reads_tokens(gemma3n):
    """Upstream contract: its decoder scales the embeddings of tokens, and its prompts are not."""
    plain, mended = gemma3n
    ids = mx.array([[5, 9, 7, 300]])
    read = logits_of(plain, inputs=ids)
    embedded = [
        logits_of(network, **network.get_input_embeddings(ids).to_dict()) for network in gemma3n
    ]
    assert mx.allclose(embedded[1], read, atol=1e-4)
    assert not mx.allclose(embedded[0], read, atol=1e-2)
    assert mx.array_equal(logits_of(mended, inputs=ids), read)


def test_gemma3n_scales_text_and_no_picture(gemma3n):
    plain, mended = gemma3n
    image = plain.config.image_token_id
    ids = mx.array([[5, image, 7]])
    given = {"pixel_values": mx.zeros(1), "cached_image_features": mx.full((1, 1, WIDTH), 0.5)}
    before, after = (
        network.get_input_embeddings(ids, **given).inputs_embeds[0] for network in (plain, mended)
    )
    assert mx.array_equal(after[1], mx.full(WIDTH, 0.5))
    assert mx.allclose(after[0], before[0] * WIDTH**0.5)
    assert mx.allclose(after[2], before[2] * WIDTH**0.5)


TOKENS = [(7 * i * i + 3 * i) % 94 for i in range(60)]


def plan_of(network):
    return batch_plan(network, CacheFactory(network), TOKENS)


def test_gpt_bigcode_embeds_the_positions_of_each_row(tmp_path):
    """Upstream contract: when this fails, mlx-lm can batch it and the mend may go."""
    network, _ = import_mlx_lm().load_model(build_text_model("gpt_bigcode", tmp_path))
    assert not plan_of(network).batches
    mend(network)
    assert plan_of(network).batching is Batching.RAGGED


def test_hunyuan_vl_turns_each_row_by_its_own_position(tmp_path):
    """Upstream contract: it gives all rows the position of the longest, as of mlx-vlm 0.7."""
    model = load_model(build_vision_model("hunyuan_vl", tmp_path))
    assert not plan_of(VisionNetwork(model)).batches
    mend(model)
    assert plan_of(VisionNetwork(model)).batching is Batching.RAGGED


def test_jina_vlm_turns_each_row_by_its_own_position():
    """Upstream contract: it gives all rows the position of the longest, as of mlx-vlm 0.7."""
    module = importlib.import_module("mlx_vlm.models.jina_vlm.language")
    rope, x = module.RoPE(16), mx.random.normal((2, 3, 4, 16))
    alone = mx.concatenate([rope(x[:1], 7), rope(x[1:], 30)])
    offsets = mx.array([7, 30])
    assert not mx.allclose(rope(x, offsets), alone, atol=1e-3)
    mend(type("Model", (), {"__module__": MODULE_OF_JINA, **with_layer_of(rope)})())
    assert mx.allclose(rope(x, offsets), alone, atol=1e-5)
    assert mx.array_equal(rope(x[:1], 7), alone[:1])


MODULE_OF_JINA = "mlx_vlm.models.jina_vlm.jina_vlm"


def with_layer_of(rope):
    attention = type("Attention", (), {"rope": rope})
    layer = type("Layer", (), {"attn": attention})
    return {"language_model": type("LanguageModel", (), {"layers": [layer]})}


def test_afm7_reads_positions_from_the_keys_that_its_layers_share(tmp_path):
    network, _ = import_mlx_lm().load_model(build_text_model("afm7", tmp_path))
    plan = plan_of(network)
    assert plan.batching is Batching.RAGGED
    assert plan.shares_prefixes


def test_rows_of_nemotron_h_end_where_their_tokens_end(tmp_path):
    """Upstream contract: the states of padded rows lack the contribution of their tokens."""
    directory = build("nemotron_h", tmp_path)
    plain, mended = (import_mlx_lm().load_model(directory)[0] for _ in range(2))
    mend(mended)
    plans = [
        batch_plan(network, CacheFactory(network), range(60), drafts=True)
        for network in (plain, mended)
    ]
    assert [bool(plan.pass_seconds) for plan in plans] == [False, True]
