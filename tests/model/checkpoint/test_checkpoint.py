import json
from pathlib import Path

import pytest

from backend.config import MAX_LAYERS
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_file import (
    declared_eos_ids,
    own_context_length,
    read_config,
    read_generation_config,
    require_weights,
)


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


def test_a_directory_without_a_config_names_what_it_holds(tmp_path: Path):
    (tmp_path / "model.Q4.gguf").touch()
    with pytest.raises(UnsupportedModelError, match=r"no config\.json; found model\.Q4\.gguf"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{broken", "[]", ""])
def test_a_broken_config_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_config_without_a_model_type_is_no_model(tmp_path: Path):
    write(tmp_path, "config.json", {"hidden_size": 1})
    with pytest.raises(UnsupportedModelError, match="does not name a model_type"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_layers", "n_layers", "n_layer"])
def test_more_layers_than_can_be_built_are_refused_before(tmp_path: Path, name: str):
    def config(count: int) -> dict[str, object]:
        own = {"model_type": "llama", name: 2}
        return {**own, "vision_config": None, "text_config": {name: count, "rope_scaling": {}}}

    write(tmp_path, "config.json", config(MAX_LAYERS))
    read_config(tmp_path)
    write(tmp_path, "config.json", config(10**7))
    with pytest.raises(LoadError, match=rf"{name} is 10000000: .* to {MAX_LAYERS} belongs there"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
@pytest.mark.parametrize("value", [False, True, 1, "x", [1]])
def test_a_quantisation_that_is_no_object_is_refused_before(
    tmp_path: Path, name: str, value: object
):
    write(tmp_path, "config.json", {"model_type": "llama", "text_config": {name: value}})
    with pytest.raises(LoadError, match=rf"text_config\.{name} is .*: an object belongs there"):
        read_config(tmp_path)


def test_weights_in_another_format_are_named(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModelError, match=r"found pytorch_model\.bin"):
        require_weights(tmp_path)


def test_missing_weight_files_are_counted(tmp_path: Path):
    (tmp_path / "model-1-of-2.safetensors").touch()
    shards = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    write(tmp_path, "model.safetensors.index.json", {"weight_map": shards})
    with pytest.raises(LoadError, match=r"1 of 2 weight files .* model-2-of-2"):
        require_weights(tmp_path)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": None, "max_seq_len": 77}, 77),
        ({"max_position_embeddings": 0}, None),
        ({}, None),
    ],
)
def test_the_context_length_has_many_spellings(config: dict[str, object], length: int | None):
    assert own_context_length(config) == length


def test_every_declared_end_counts():
    configs = (
        {"eos_token_id": 2, "text_config": {"eos_token_id": [7]}},
        {"eos_token_id": [1, 106]},
        {"eos_token_id": None},
        {},
    )
    assert declared_eos_ids(*configs) == {1, 2, 7, 106}


def test_a_broken_generation_config_counts_for_nothing(tmp_path: Path):
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    assert read_generation_config(tmp_path) == {}
