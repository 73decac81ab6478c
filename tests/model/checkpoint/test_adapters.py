import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from adapters import RANK, SCALE, write_adapter
from mlx.utils import tree_flatten

from backend.config import Adapter, ModelOptions
from backend.errors import LoadError
from backend.model.checkpoint.gate import require_loadable
from backend.model.loader import load

pytestmark = pytest.mark.mlx

Options = Callable[..., ModelOptions]
Build = Callable[[str], Path]
IDS = mx.array([[1, 2, 3, 4]])
WHOLE = {"rank": RANK, "scale": SCALE, "dropout": 0.0}


def logits(options: ModelOptions, directory: Path) -> mx.array:
    return load(options, directory).network(IDS)


def is_close(left: mx.array, right: mx.array) -> bool:
    return bool(mx.allclose(left, right, atol=1e-4, rtol=1e-3).item())


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[Path, Path]:
    return write_adapter(tmp_path / "one", seed=1), write_adapter(tmp_path / "two", seed=2)


def test_an_adapter_changes_the_logits_as_mlx_lm_does(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path]
):
    import mlx_lm

    base = tiny_models("llama")
    adapted = logits(options(adapters=(Adapter(str(adapters[0])),)), base)
    expected, _ = mlx_lm.load(str(base), adapter_path=str(adapters[0]))
    assert is_close(adapted, expected(IDS))
    assert not is_close(adapted, logits(options(), base))


def test_the_factor_multiplies_the_adapters_own_scale(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path], tmp_path: Path
):
    halved = write_adapter(tmp_path / "halved", seed=1)
    config = json.loads((halved / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] = SCALE / 2
    (halved / "adapter_config.json").write_text(json.dumps(config))
    base = tiny_models("llama")
    by_factor = logits(options(adapters=(Adapter(str(adapters[0]), 0.5),)), base)
    assert is_close(by_factor, logits(options(adapters=(Adapter(str(halved)),)), base))
    none = logits(options(adapters=(Adapter(str(adapters[0]), 0.0),)), base)
    assert is_close(none, logits(options(), base))


def test_several_adapters_add_up_in_any_order(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path]
):
    base = tiny_models("llama")
    one, two = (Adapter(str(path)) for path in adapters)
    both = logits(options(adapters=(one, two)), base)
    assert is_close(both, logits(options(adapters=(two, one)), base))
    assert not is_close(both, logits(options(adapters=(two,)), base))


def test_adapter_weights_are_cast_with_the_rest(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path]
):
    chosen = options(adapters=(Adapter(str(adapters[0])),), dtype="bfloat16")
    model = load(chosen, tiny_models("llama"))
    assert {w.dtype for _, w in tree_flatten(model.network.parameters())} == {mx.bfloat16}


def test_an_adapter_is_found_below_the_models_dir(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path]
):
    base, adapter = tiny_models("llama"), adapters[0]
    relative = options(adapters=(Adapter(adapter.name),), models_dir=adapter.parent)
    by_file = options(adapters=(Adapter(str(adapter / "adapters.safetensors")),))
    assert is_close(logits(relative, base), logits(by_file, base))


def test_a_missing_adapter_is_named(options: Options, tiny_models: Build):
    with pytest.raises(LoadError, match=r"^LoraAdapter: gone does not exist"):
        logits(options(adapters=(Adapter("gone"),)), tiny_models("llama"))


def test_an_adapter_of_another_format_is_named(
    options: Options, tiny_models: Build, tmp_path: Path
):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(LoadError, match=r"has no adapters\.safetensors: .* mlx-lm's format"):
        logits(options(adapters=(Adapter(str(tmp_path)),)), tiny_models("llama"))


def test_an_adapter_for_another_model_is_refused(
    options: Options, tiny_models: Build, tmp_path: Path
):
    wide = write_adapter(tmp_path / "wide", seed=1, width=128)
    with pytest.raises(LoadError, match=r"does not fit: .* does not match"):
        logits(options(adapters=(Adapter(str(wide)),)), tiny_models("llama"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "num_layers is missing"),
        ({"num_layers": 2}, "lora_parameters is missing"),
        ({"num_layers": 2, "lora_parameters": {"rank": 2, "alpha": 4}}, "lora_parameters.scale"),
        ({"num_layers": 2, "lora_parameters": {"rank": 10**9}}, "lora_parameters.rank is 1000"),
        (
            {"num_layers": 2, "lora_parameters": {"rank": 2, "scale": float("nan")}},
            "lora_parameters.scale is nan",
        ),
        ({"fine_tune_type": "magic"}, "fine_tune_type is 'magic'"),
        *(
            ({"num_layers": 2, "lora_parameters": WHOLE | wrong}, f"lora_parameters.{words}")
            for wrong, words in (
                ({"dropout": 1}, "dropout is 1, not a number of at least 0 and below 1"),
                ({"dropout": float("nan")}, "dropout is nan"),
                ({"dropout": "0.5"}, "dropout is '0.5'"),
                ({"keys": 3}, "keys is not a list of names"),
                ({"keys": "q_proj"}, "keys is not a list of names"),
            )
        ),
    ],
)
def test_a_config_that_says_too_little_is_named(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path], config: object, words: str
):
    path = adapters[0] / "adapter_config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(LoadError, match=rf"adapter_config\.json: {words}"):
        logits(options(adapters=(Adapter(str(adapters[0])),)), tiny_models("llama"))


@pytest.mark.parametrize(
    ("config", "scale", "words"),
    [
        (WHOLE | {"rank": 3}, 1.0, "lora_a has the shape .*, without the rank of its config, 3"),
        (None, 2.0, "is a full fine-tune: it has no scale"),
    ],
)
def test_what_the_files_of_an_adapter_tell_is_refused_before_a_model_is_dropped(
    options: Options,
    tiny_models: Build,
    adapters: tuple[Path, Path],
    config: object,
    scale: float,
    words: str,
):
    kind = {"num_layers": 2, "lora_parameters": config} if config else {"fine_tune_type": "full"}
    (adapters[0] / "adapter_config.json").write_text(json.dumps(kind))
    chosen = options(adapters=(Adapter(str(adapters[0]), scale),))
    with pytest.raises(LoadError, match=words):
        require_loadable(chosen, tiny_models("llama"))


def test_tensors_that_are_no_adapter_are_named(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path]
):
    path = adapters[0] / "adapters.safetensors"
    mx.save_safetensors(str(path), {"model.norm.weight": mx.zeros((RANK,))})
    with pytest.raises(LoadError, match=r"model\.norm\.weight is not a matrix of an adapter"):
        require_loadable(options(adapters=(Adapter(str(adapters[0])),)), tiny_models("llama"))


def test_a_cut_adapter_is_named_and_not_the_model(
    options: Options, tiny_models: Build, adapters: tuple[Path, Path]
):
    path = adapters[0] / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(LoadError, match=r"adapters\.safetensors is truncated"):
        logits(options(adapters=(Adapter(str(adapters[0])),)), tiny_models("llama"))
