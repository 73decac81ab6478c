"""The inputs and drafts of a head, and the models that it is for."""

import json
import shutil

import mlx.core as mx
import pytest
from fp8 import store_fp8
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_vlm.speculative.drafters import load_drafter

from backend.config import ModelOptions
from backend.engine.passes.caches import CacheFactory
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.heads import HiddenTap, Target, build_head, head_alone, head_beside, head_config
from backend.model.loader import load
from scripts import tiny_vision
from scripts.eagle_head import IDS, add_eagle
from scripts.mtp_head import add_head
from scripts.nextn_head import add_nextn
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return build("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=6)


def loaded(directory):
    return import_mlx_lm().load_model(directory)[0]


def built(head, model):
    return build_head(head_alone(head), head, loaded(model))


def change_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(config), encoding="utf-8")


def change_weights(directory, change):
    path = str(directory / "model.safetensors")
    weights = change(mx.load(path))
    mx.eval(weights)
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})


def drafted(head, states, tokens, count):
    """Return a head's greedy drafts after tokens, which follow the states [1, T, D]."""
    caches, found = head.make_cache(), []
    head.show(states)
    for _ in range(count):
        logits = head(mx.array([tokens]), caches)
        tokens = [mx.argmax(logits[0, -1]).item()]
        found += tokens
        head.show(head.after[:, -1:])
    return found


@pytest.mark.parametrize("fields", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}])
def test_an_eagle_head_drafts_as_it_does_in_mlx_vlm(llama, tmp_path, fields):
    add_eagle(llama, tmp_path, **fields, **{IDS: [2, 3, 5]})
    ours = built(tmp_path, llama)
    theirs, _ = load_drafter(str(tmp_path), "eagle3")
    states = mx.random.normal((1, 9, 3 * 64), key=mx.random.key(3))
    tokens = [7 * n % 512 for n in range(10)]
    theirs.reset(loaded(llama))
    sampler = lambda logits: mx.argmax(logits, axis=-1)  # noqa: E731 (as upstream calls it)
    theirs.prefill_from_target_hidden(mx.array([tokens[:9]]), states, tokens[9], sampler)
    expected = theirs.draft_block(tokens[9], None, None, 6, sampler).tolist()[0]
    assert drafted(ours, states, tokens[1:], 5) == expected


def test_the_states_are_those_after_the_layers_that_the_head_names(llama, tmp_path):
    network = loaded(llama)
    head = add_eagle(llama, tmp_path, **{IDS: [2, 3, 6]})
    tap = HiddenTap(build_head(head_alone(head), head, network).tapped)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    network(tokens, cache=[KVCache() for _ in range(6)])
    found = tap.take()
    assert not tap.take()
    states = loaded(llama).model.embed_tokens(tokens)
    after = []
    for layer in loaded(llama).model.layers:
        states = layer(states, "causal")
        after.append(states)
    for one, place in zip(found, (2, 3, 6), strict=True):
        assert mx.allclose(one, after[place - 1], atol=1e-5)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_5", "granitemoehybrid"]
)
def test_an_eagle_head_reads_the_layers_of_every_family(networks, family):
    network = networks(family)
    layers = Target(network).layers
    tap = HiddenTap([layers[1], layers[-1], layers[1]])
    network(mx.array([[3, 1, 4]]), cache=CacheFactory(network)())
    assert [states.shape for states in tap.take()] == [(1, 3, 64)] * 3


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl"])
def test_it_reads_those_of_models_that_see(tmp_path, family):
    directory = tiny_vision.build(family, tmp_path)
    network = load(ModelOptions(model=str(directory)), directory).network
    tap = HiddenTap(Target(network).layers[:2])
    network(mx.array([[3, 1, 4]]), cache=CacheFactory(network)())
    assert [states.shape for states in tap.take()] == [(1, 3, 64)] * 2


def test_a_model_that_is_built_in_another_way_is_refused():
    with pytest.raises(UnsupportedModelError, match="no embeddings, layers and norm where heads"):
        Target(nn.Linear(2, 2))


def test_of_layers_that_return_several_values_the_first_is_taken():
    class Layer:
        def __call__(self, x):
            return x + 1, x, x

    layer = Layer()
    tap = HiddenTap([layer])
    assert len(layer(mx.array([1]))) == 3
    assert tap.take()[0].tolist() == [2]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, [2, 18, 33]),
        ({IDS: [2, 18, 33]}, [2, 18, 33]),
        ({IDS: [1, 17, 32]}, [2, 18, 33]),
        ({"eagle_config": {IDS: [1, 17, 32]}}, [2, 18, 33]),
        ({"eagle_config": {IDS: [24, 30, 36]}}, [24, 30, 36]),
    ],
)
def test_ids_that_begin_with_1_count_the_layers_from_0(fields, found):
    config = head_config({"vocab_size": 8, **fields}, 36)
    assert config["target_layer_ids"] == found
    assert config["capture_layer_ids"] == [each - 1 for each in found]


def test_both_layouts_of_a_head_are_the_same_head(llama, tmp_path):
    heads = [
        built(add_eagle(llama, tmp_path / str(nested), is_nested=nested), llama)
        for nested in (True, False)
    ]
    inputs = mx.array([[1, 2, 3, 4]])
    logits = [head(inputs, head.make_cache()) for head in heads]
    assert mx.array_equal(*logits)
    assert logits[0].shape == (1, 4, 512)
    unknown = [token for token in range(512) if logits[0][0, 0, token].item() == -mx.inf]
    assert unknown == list(range(33, 512, 64))


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("glm")
    return build("deepseek_v3", directory, model_type="glm4_moe_lite")


def test_a_layer_of_the_checkpoint_and_one_split_off_are_the_same_head(glm, tmp_path):
    apart, beside = (shutil.copytree(glm, tmp_path / name) for name in ("apart", "beside"))
    apart = built(add_nextn(apart, tmp_path / "head"), apart)
    kind = head_beside(add_nextn(beside))
    beside = build_head(kind, beside, loaded(beside))
    inputs = mx.array([[1, 2, 3, 4]])
    one, other = (head(inputs, head.make_cache()) for head in (apart, beside))
    assert mx.allclose(one, other, atol=1e-5)


def test_a_layer_without_an_output_of_its_own_writes_with_that_of_the_model(glm, tmp_path):
    directory = shutil.copytree(glm, tmp_path / "model")
    whole = built(add_nextn(directory, tmp_path / "whole"), directory)
    shutil.copytree(tmp_path / "whole", tmp_path / "head")
    shared = ("lm_head.weight", "model.embed_tokens.weight")
    change_weights(
        tmp_path / "head", lambda w: {n: each for n, each in w.items() if n not in shared}
    )
    head = built(tmp_path / "head", directory)
    assert "lm_head" in whole.parameters()
    assert not {"lm_head", "embed_tokens"} & head.parameters().keys()
    inputs = mx.array([[1, 2, 3, 4]])
    one, other = (each(inputs, each.make_cache()) for each in (whole, head))
    assert mx.allclose(one, other, atol=1e-5)


def test_the_layer_of_a_deepseek_is_a_head_too(tmp_path):
    model = build("deepseek_v3", tmp_path / "model")
    beside = add_nextn(shutil.copytree(model, tmp_path / "beside"))
    head = build_head(head_beside(beside), beside, loaded(model))
    logits = head(mx.array([[1, 2, 3]]), head.make_cache())
    assert logits.shape == (1, 3, 512)
    assert mx.all(mx.isfinite(logits))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_head_in_8_bits_is_the_head_as_far_as_8_bits_tell(tmp_path, family):
    model = build(family, tmp_path / "model", hidden_size=192)
    full = add_nextn(shutil.copytree(model, tmp_path / "full"))
    packed = store_fp8(shutil.copytree(full, tmp_path / "packed"))
    kind = head_beside(packed)
    one, other = (build_head(kind, each, loaded(model)) for each in (full, packed))
    inputs = mx.array([[1, 2, 3]])
    one, other = (head(inputs, head.make_cache()).astype(mx.float32) for head in (one, other))
    error = mx.abs(one - other).max().item()
    assert 0 < error < 0.2 * mx.abs(one).max().item()


def test_what_is_shown_may_be_read_in_several_calls(glm, tmp_path):
    head = built(add_nextn(shutil.copytree(glm, tmp_path / "model"), tmp_path / "head"), glm)
    states = mx.random.normal((1, 3, 64), key=mx.random.key(1))
    found = []
    for steps in ([[5, 6, 7]], [[5], [6], [7]]):
        head.show(states)
        caches = head.make_cache()
        logits = [head(mx.array([tokens]), caches) for tokens in steps]
        found.append((mx.concatenate(logits, axis=1), head.after))
    for one, other in zip(*found, strict=True):
        assert one.shape[1] == 3
        assert mx.allclose(one, other, atol=1e-4)


def test_a_head_shares_the_embeddings_of_the_model_unless_it_has_trained_its_own(llama, tmp_path):
    shared = built(add_eagle(llama, tmp_path / "shared"), llama)
    own = built(add_eagle(llama, tmp_path / "own", embed_requires_grad=True), llama)
    assert "embed_tokens" not in shared.parameters()
    assert own.parameters()["embed_tokens"]["weight"].shape == (512, 64)
    inputs = mx.array([[1, 2]])
    one, other = (head(inputs, head.make_cache()) for head in (shared, own))
    assert not mx.allclose(one[..., 1:16], other[..., 1:16])


def test_a_head_of_the_whole_vocabulary_may_write_with_the_output_of_the_model(llama, tmp_path):
    add_eagle(llama, tmp_path, draft_vocab_size=512)
    change_weights(tmp_path, lambda w: {n: a for n, a in w.items() if n != "lm_head.weight"})
    head = built(tmp_path, llama)
    assert "lm_head" not in head.parameters()
    inputs = mx.array([[1, 2]])
    logits = head(inputs, head.make_cache())
    network = loaded(llama)
    normed = mx.fast.rms_norm(head.after, mx.ones(64), 1e-5)
    assert mx.allclose(logits, network.lm_head(normed), atol=1e-4)


def test_a_quantised_head_is_loaded_quantised(llama, tmp_path):
    add_eagle(llama, tmp_path / "head")
    plain = built(shutil.copytree(tmp_path / "head", tmp_path / "plain"), llama)

    def quantised(weights):
        packed = mx.quantize(weights.pop("lm_head.weight"), group_size=32, bits=8)
        names = [f"lm_head.{part}" for part in ("weight", "scales", "biases")]
        return weights | dict(zip(names, packed, strict=True))

    change_weights(tmp_path / "head", quantised)
    change_config(tmp_path / "head", quantization={"group_size": 32, "bits": 8})
    head = built(tmp_path / "head", llama)
    assert head.parameters()["lm_head"]["weight"].dtype == mx.uint32
    inputs = mx.array([[5, 6, 7]])
    one, other = (each(inputs, each.make_cache()) for each in (plain, head))
    assert mx.allclose(one[..., 1:16], other[..., 1:16], atol=0.1)


def test_positions_are_scaled_as_the_head_was_trained(llama, tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    add_eagle(llama, tmp_path, is_nested=False, rope_scaling=scaling)
    rope = built(tmp_path, llama)._head.layers[0].self_attn.rope
    assert rope.scale == 0.25


REFUSALS = {
    "width": (
        {"target_hidden_size": 128},
        "the EAGLE-3 head is for states of 128 numbers, and the model has 64",
    ),
    "layers": (
        {IDS: [2, 5, 9]},
        "the EAGLE-3 head reads states after layers 2, 5, 9, and the model has 6",
    ),
    "two layers": (
        {IDS: [2, 5]},
        "the EAGLE-3 head reads states after layers 2, 5, and the model has 6",
    ),
    "last states": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "the EAGLE-3 head reads the last hidden states only",
    ),
    "MLA": ({"kv_lora_rank": 512, "is_nested": False}, "the EAGLE-3 head has MLA"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_eagle_head_for_another_model_is_refused(llama, tmp_path, case):
    fields, words = REFUSALS[case]
    add_eagle(llama, tmp_path, **fields)
    with pytest.raises(UnsupportedModelError, match=words):
        built(tmp_path, llama)


def test_an_eagle_head_for_another_vocabulary_is_refused(llama, tmp_path):
    other = build("llama", tmp_path / "other", vocab_size=600, num_hidden_layers=6)
    with pytest.raises(UnsupportedModelError, match=r"of 600 tokens, and the model has 512"):
        built(add_eagle(other, tmp_path / "head"), llama)


def test_drafts_that_the_model_has_no_ids_for_are_refused(llama, tmp_path):
    add_eagle(llama, tmp_path)
    change_weights(tmp_path, lambda weights: weights | {"d2t": weights["d2t"] + 9})
    with pytest.raises(LoadError, match=r"drafts the ids 9 to 520 \(d2t\), and the model has 512"):
        built(tmp_path, llama)


def test_an_mtp_head_for_states_of_another_width_is_refused(tmp_path, networks):
    build("qwen3_5", tmp_path, hidden_size=128)
    head = add_head(tmp_path, tmp_path / "head")
    with pytest.raises(UnsupportedModelError, match=r"states of 128 numbers, and the model has 64"):
        build_head(head_alone(head), head, networks("qwen3_5"))


def test_an_mtp_head_for_another_vocabulary_is_refused(glm, tmp_path):
    other = build("deepseek_v3", tmp_path, model_type="glm4_moe_lite", vocab_size=600)
    head = add_nextn(other, tmp_path / "head")
    with pytest.raises(UnsupportedModelError, match=r"of 600 tokens, and the model has 512"):
        built(head, glm)


def test_a_model_is_no_head_and_a_llama_brings_none(llama, glm, tmp_path):
    assert head_beside(glm) is None
    assert head_alone(llama) is None
    assert head_beside(llama) is None
    assert head_alone(tmp_path) is None
    assert head_beside(add_head(build("qwen3_5", tmp_path))).name == "MTP head"
