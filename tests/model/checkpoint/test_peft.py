import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from adapters import write_adapter

from backend.config import Adapter, ModelOptions
from backend.errors import LoadError
from backend.model.loader import load

pytestmark = pytest.mark.mlx

Options = Callable[..., ModelOptions]
Build = Callable[[str], Path]
IDS = mx.array([[1, 2, 3, 4]])
RANK, ALPHA = 2, 6
OUTPUTS = {"self_attn.q_proj": 64, "self_attn.v_proj": 32, "mlp.down_proj": 64}
INPUTS = {"self_attn.q_proj": 64, "self_attn.v_proj": 64, "mlp.down_proj": 128}


def logits(options: ModelOptions, directory: Path) -> mx.array:
    return load(options, directory).network(IDS)


def is_close(left: mx.array, right: mx.array) -> bool:
    return bool(mx.allclose(left, right, atol=1e-4, rtol=1e-3).item())


def write_peft(directory: Path, *, root: str = "base_model.model.model.", **config) -> Path:
    directory.mkdir()
    mx.random.seed(3)
    weights = {}
    for layer in range(2):
        for name, width in OUTPUTS.items():
            path = f"{root}layers.{layer}.{name}"
            weights[f"{path}.lora_A.weight"] = mx.random.normal((RANK, INPUTS[name]))
            weights[f"{path}.lora_B.weight"] = mx.random.normal((width, RANK))
    mx.save_safetensors(str(directory / "adapter_model.safetensors"), weights, {"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def merged(base: Path, adapter: Path, directory: Path, scale: Callable[[str], float]) -> Path:
    """Write a checkpoint whose weights are W + scale * B @ A."""
    shutil.copytree(base, directory)
    weights = mx.load(str(base / "model.safetensors"))
    pairs = mx.load(str(adapter / "adapter_model.safetensors"))
    for name in [name for name in pairs if ".lora_A." in name]:
        b = pairs[name.replace("lora_A", "lora_B")]
        path = "model.layers." + name.partition("layers.")[2].partition(".lora_A")[0] + ".weight"
        weights[path] = weights[path] + scale(path) * (b @ pairs[name])
    mx.eval(weights)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, lambda _: ALPHA / RANK),
        ({"use_rslora": True}, lambda _: ALPHA / RANK**0.5),
        ({"alpha_pattern": {"q_proj": 10}}, lambda p: (10 if "q_proj" in p else ALPHA) / RANK),
        (
            {"alpha_pattern": {r"^.*\.[0-9]+\.self_attn\.(q|k)_proj$": 10}},
            lambda p: (10 if "q_proj" in p else ALPHA) / RANK,
        ),
    ],
)
def test_an_adapter_adds_its_scaled_product_to_the_weights(
    options: Options, tiny_models: Build, tmp_path: Path, config, scale
):
    base = tiny_models("llama")
    adapter = write_peft(tmp_path / "peft", **config)
    adapted = logits(options(adapters=(Adapter(str(adapter)),)), base)
    expected = logits(options(), merged(base, adapter, tmp_path / "merged", scale))
    assert is_close(adapted, expected)
    assert not is_close(adapted, logits(options(), base))


def test_the_factor_of_a_request_multiplies_it_and_adapters_of_both_formats_stack(
    options: Options, tiny_models: Build, tmp_path: Path
):
    base, own = tiny_models("llama"), Adapter(str(write_adapter(tmp_path / "own", seed=1)))
    peft = write_peft(tmp_path / "peft")
    half = merged(base, peft, tmp_path / "merged", lambda _: ALPHA / RANK / 2)
    both = logits(options(adapters=(own, Adapter(str(peft), 0.5))), base)
    assert is_close(both, logits(options(adapters=(own,)), half))


def test_a_decoder_may_be_nested_in_another_way(
    options: Options, tiny_models: Build, tmp_path: Path
):
    base = tiny_models("llama")
    plain = Adapter(str(write_peft(tmp_path / "plain")))
    nested = write_peft(tmp_path / "nested", root="base_model.model.model.language_model.")
    expected = logits(options(adapters=(plain,)), base)
    assert is_close(logits(options(adapters=(Adapter(str(nested)),)), base), expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "r is 0, not a whole number"),
        ({"r": "8"}, "r is '8', not"),
        ({"r": 10**400}, "r is 1000"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is not an object"),
        ({"rank_pattern": {"q_proj": None}}, r"rank_pattern\['q_proj'\] is None"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern '\(' is no name"),
        ({"alpha_pattern": {"([a-z_.0-9]+)+!": 1}}, "is no name"),
        ({"alpha_pattern": {"(.|.)" * 40 + "!": 1}}, "is no name"),
        ({"alpha_pattern": {"[z-a]": 1}}, "is no name"),
        ({"alpha_pattern": {".*" * 30 + "!": 1}}, "is no name"),
    ],
)
def test_what_is_no_plain_lora_is_named(
    options: Options, tiny_models: Build, tmp_path: Path, config, words
):
    adapter = write_peft(tmp_path / "peft", **config)
    with pytest.raises(LoadError, match=words):
        logits(options(adapters=(Adapter(str(adapter)),)), tiny_models("llama"))


def damaged(adapter: Path, change: Callable[[dict], dict]) -> Adapter:
    path = adapter / "adapter_model.safetensors"
    weights = change(mx.load(str(path)))
    mx.eval(weights)
    mx.save_safetensors(str(path), weights)
    return Adapter(str(adapter))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {**w, "a.b.lora_A.weight": mx.ones((2, 4))}, "a.b has a matrix A or B without"),
        (
            lambda w: {**w, "embed.lora_embedding_A": mx.ones((2, 4))},
            "embed.lora_embedding_A is no",
        ),
        (lambda w: {k.replace("layers.1", "layers.7"): v for k, v in w.items()}, r"layers\.7"),
        (lambda w: {k: v[0, 0] if "_A" in k else v for k, v in w.items()}, "is not a LoRA matrix"),
        (lambda w: {k: v[:, :2] if "_A" in k else v for k, v in w.items()}, "the model takes"),
    ],
)
def test_what_does_not_fit_is_named(
    options: Options, tiny_models: Build, tmp_path: Path, change, words
):
    adapter = damaged(write_peft(tmp_path / "peft"), change)
    with pytest.raises(LoadError, match=words):
        logits(options(adapters=(adapter,)), tiny_models("llama"))
