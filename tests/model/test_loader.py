import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from backend.config import ModelOptions
from backend.core.prompt import Message
from backend.errors import (
    LoadError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from backend.model.checkpoint import weights
from backend.model.checkpoint.weights import cast_weights
from backend.model.loaded import LoadedModel
from backend.model.loader import load

pytestmark = pytest.mark.mlx

Options = Callable[..., ModelOptions]
Build = Callable[[str], Path]


def loaded(options: ModelOptions, directory: Path) -> LoadedModel:
    return load(options, directory)


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def test_the_card_tells_what_is_known(options: Options, tiny_models: Build):
    directory = tiny_models("llama")
    model = loaded(options(model="org/tiny"), directory)
    card = model.card
    assert (card.name, card.path, card.model_type) == ("org/tiny", str(directory), "llama")
    assert (card.context_length, card.vocab_size) == (4096, 512)
    file_bytes = (directory / "model.safetensors").stat().st_size
    assert file_bytes - 4096 < card.weights_bytes < file_bytes
    assert card.eos_token_ids == {model.tokenizer.token_id("<|im_end|>")}
    assert card.supports_tools
    assert card.supports_thinking


def test_the_vocabulary_is_as_wide_as_the_logits(options: Options, tmp_path: Path):
    from scripts import tiny_models

    wide = tiny_models.build_llama(tmp_path / "wide", hidden=64, layers=1, vocab=640)
    narrow = tiny_models.build_llama(tmp_path / "narrow", hidden=64, layers=1, vocab=512)
    model = loaded(options(tokenizer=str(narrow)), wide)
    assert model.card.vocab_size == 640
    assert len(model.tokenizer.vocabulary) == 512
    assert model.tokenizer.token_bytes(639) == b""


def test_the_network_runs_after_loading(options: Options, tiny_models: Build):
    model = loaded(options(), tiny_models("qwen3"))
    ids = model.tokenizer.encode(
        model.template.render([Message(role="user", content="hi")], [], {}), adds_special=False
    )
    logits = model.network(mx.array([ids]))
    assert logits.shape == (1, len(ids), model.card.vocab_size)


def test_an_explicit_limit_wins_over_the_models_own(
    options: Options, tiny_models: Build, caplog: pytest.LogCaptureFixture
):
    shorter = loaded(options(max_model_len=100), tiny_models("llama"))
    assert shorter.card.context_length == 100
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    longer = loaded(options(max_model_len=9000), tiny_models("llama"))
    assert longer.card.context_length == 9000
    assert "exceeds the 4096 tokens" in caplog.text


def test_a_model_without_a_limit_has_none(options: Options, tiny_models: Build):
    assert loaded(options(), tiny_models("mamba2")).card.context_length is None


def test_a_limit_inside_the_text_config_is_found(options: Options, tiny_models: Build):
    assert loaded(options(), tiny_models("llama4")).card.context_length == 4096


def test_every_end_that_anything_declares_ends_a_reply(options: Options, llama_copy: Path):
    edit_json(llama_copy / "config.json", eos_token_id=3)
    edit_json(llama_copy / "generation_config.json", eos_token_id=[4, 5])
    model = loaded(options({"eos_token": "</think>"}), llama_copy)
    names = ("<|im_end|>", "</think>")
    assert model.card.eos_token_ids == {3, 4, 5, *map(model.tokenizer.token_id, names)}


def test_an_end_that_is_no_token_is_left_out(options: Options, llama_copy: Path):
    edit_json(llama_copy / "config.json", eos_token_id=[-1, 3, 2**20])
    model = loaded(options(), llama_copy)
    assert model.card.eos_token_ids == {3, model.tokenizer.token_id("<|im_end|>")}


def test_a_directory_without_a_vocabulary_is_told(
    options: Options, tiny_models: Build, tmp_path: Path
):
    directory = shutil.copytree(tiny_models("qwen3"), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(LoadError, match="has no tokenizer: none of its files has a vocabulary"):
        loaded(options(), directory)


def test_chosen_special_tokens_are_used(options: Options, tiny_models: Build):
    model = loaded(options({"bos_token": "<|endoftext|>"}), tiny_models("llama"))
    assert model.tokenizer.encode_prompt("hi")[0] == model.tokenizer.token_id("<|endoftext|>")


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token"])
def test_a_special_token_outside_the_vocabulary_fails_the_load(
    options: Options, tiny_models: Build, role: str
):
    with pytest.raises(LoadError, match=f"^{role}: '<nope>' is not a token"):
        loaded(options({role: "<nope>"}), tiny_models("llama"))


def test_a_chat_template_is_taken_as_text(options: Options, tiny_models: Build):
    model = loaded(options({"chat_template": "{{ messages[0].content }}!"}), tiny_models("llama"))
    assert model.template.render([Message(role="user", content="hi")], [], {}) == "hi!"
    assert model.template.writes_tools
    assert model.card.supports_tools


def test_an_option_leaves_a_template_without_tools(options: Options, tiny_models: Build):
    tuning = {"chat_template": "{{ messages[0].content }}!", "write_tools": False}
    model = loaded(options(tuning), tiny_models("llama"))
    assert not model.template.writes_tools
    assert not model.card.supports_tools


def test_a_chat_template_is_taken_from_a_file_of_the_models_dir(
    options: Options, tiny_models: Build, tmp_path: Path
):
    (tmp_path / "short.jinja").write_text("{{ messages[0].content }}?")
    chosen = options({"chat_template": "short.jinja"}, models_dir=tmp_path)
    assert loaded(chosen, tiny_models("llama")).template.text == "{{ messages[0].content }}?"


def test_a_chat_template_that_is_neither_fails_the_load(options: Options, tiny_models: Build):
    with pytest.raises(LoadError, match=r"^chat_template: 'gone\.jinja' is neither"):
        loaded(options({"chat_template": "gone.jinja"}), tiny_models("llama"))


def test_another_tokenizer_may_be_named(options: Options, llama_copy: Path, tiny_models: Build):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (llama_copy / name).unlink()
    source = tiny_models("qwen3")
    named = options(tokenizer=source.name, models_dir=source.parent)
    assert len(loaded(named, llama_copy).tokenizer.vocabulary) == 512
    with pytest.raises(LoadError, match=r"^Tokenizer: gone does not exist"):
        loaded(options(tokenizer="gone"), llama_copy)
    with pytest.raises(LoadError, match="no readable tokenizer"):
        loaded(options(), llama_copy)


@pytest.mark.parametrize(
    ("dtype", "share"), [("float32", 1.0), ("float16", 0.5), ("bfloat16", 0.5)]
)
def test_weights_are_cast(options: Options, tiny_models: Build, dtype: str, share: float):
    plain = loaded(options(), tiny_models("llama"))
    model = loaded(options(dtype=dtype), tiny_models("llama"))
    assert {w.dtype for _, w in tree_flatten(model.network.parameters())} == {getattr(mx, dtype)}
    assert model.card.weights_bytes == share * plain.card.weights_bytes


def test_weights_that_the_model_keeps_exact_are_not_cast(options: Options, tiny_models: Build):
    network = loaded(options(), tiny_models("deepseek_v3")).network
    cast_weights(network, "bfloat16")
    exact = {n for n, w in tree_flatten(network.parameters()) if w.dtype == mx.float32}
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def test_a_quantised_model_loads(options: Options, tiny_models: Build, llama_copy: Path):
    network = loaded(options(), tiny_models("llama")).network
    nn.quantize(network, group_size=32, bits=4)
    parameters = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(llama_copy / "model.safetensors"), parameters)
    edit_json(llama_copy / "config.json", quantization={"group_size": 32, "bits": 4})
    assert loaded(options(dtype="float16"), llama_copy).card.vocab_size == 512


def test_private_arrays_are_evaluated_too(options: Options, llama_copy: Path):
    """Lazy ones raise in another thread; llama3's rope frequencies are one."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    edit_json(llama_copy / "config.json", rope_scaling=scaling)
    model = loaded(options(), llama_copy)
    threaded: list[Any] = []

    def work() -> None:
        mx.eval(model.network(mx.array([[1, 2]])))
        threaded.append(True)
        mx.clear_streams()

    run_in_thread(work)
    assert threaded == [True]


def run_in_thread(work: Callable[[], None]) -> None:
    import threading

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_an_unknown_model_type_is_named(options: Options, llama_copy: Path):
    edit_json(llama_copy / "config.json", model_type="gpt6")
    with pytest.raises(UnsupportedModelError, match="model type 'gpt6', which none of mlx-lm"):
        loaded(options(), llama_copy)


def test_a_model_module_that_exits_fails_the_load_only(options: Options, llama_copy: Path):
    edit_json(llama_copy / "config.json", model_type="olmo")
    with pytest.raises(UnsupportedModelError, match="needs a package that is not installed"):
        loaded(options(), llama_copy)


def test_a_config_that_lacks_a_field_names_it(options: Options, llama_copy: Path):
    config = json.loads((llama_copy / "config.json").read_text())
    del config["hidden_size"]
    (llama_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="hidden_size"):
        loaded(options(), llama_copy)


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 3}])
def test_weights_that_do_not_match_are_told(
    options: Options, llama_copy: Path, change: dict[str, int]
):
    edit_json(llama_copy / "config.json", **change)
    with pytest.raises(LoadError, match=r"do not match its config\.json"):
        loaded(options(), llama_copy)


@pytest.mark.parametrize("part", ["", "q_proj.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("kind", ["int8", "uint32", "bool", "complex64"])
def test_weights_without_fractions_are_named(
    options: Options, llama_copy: Path, part: str, kind: str
):
    path = llama_copy / "model.safetensors"
    weights = {
        name: weight.astype(getattr(mx, kind, mx.bool_)) if part in name else weight
        for name, weight in mx.load(str(path)).items()
    }
    mx.save_safetensors(str(path), weights)
    with pytest.raises(LoadError, match=f"{part} has values of type {kind}, no") as raised:
        loaded(options(), llama_copy)
    assert type(raised.value) is LoadError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "does not fit the weights"),
        ({"quantization_config": {"quant_method": "awq"}}, "does not fit the weights"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "it lacks 'quant_algo'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "format None"),
        ({"quantization": {}}, "it lacks 'group_size'"),
        ({"quantization": {"group_size": 64}}, "it lacks 'bits'"),
        ({"quantization": {"group_size": 64, "bits": 4, "lm_head": "x"}}, "must return a bool"),
    ],
)
def test_a_quantisation_that_the_weights_do_not_have_names_its_field(
    options: Options, llama_copy: Path, changes: dict[str, object], words: str
):
    # Of the two fields, a null one has no part in it.
    edit_json(llama_copy / "config.json", **{"quantization": None, **changes})
    with pytest.raises(LoadError, match=words) as raised:
        loaded(options(), llama_copy)
    assert type(raised.value) is LoadError
    assert str(raised.value).startswith(f"{llama_copy / 'config.json'}: {next(iter(changes))} is ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"quant_method": "modelopt", "quantization": {"quant_algo": "X"}}', "quant_algo: X"),
        ("[1]", "is not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_separate_file_of_the_quantisation_is_named(
    options: Options, llama_copy: Path, content: str, words: str
):
    (llama_copy / "hf_quant_config.json").write_text(content)
    with pytest.raises(LoadError, match=rf"hf_quant_config\.json.*{words}") as raised:
        loaded(options(), llama_copy)
    assert type(raised.value) is LoadError


def test_spoilt_weights_are_told(options: Options, llama_copy: Path):
    (llama_copy / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(LoadError, match="git lfs pull"):
        loaded(options(), llama_copy)


def test_code_of_the_models_own_needs_trust(options: Options, llama_copy: Path):
    (llama_copy / "own.py").write_text(
        "from mlx_lm.models import llama\n"
        "class ModelArgs(llama.ModelArgs): pass\n"
        "class Model(llama.Model): pass\n"
    )
    edit_json(llama_copy / "config.json", model_file="own.py")
    with pytest.raises(UnsupportedModelError, match="set trust_remote_code"):
        loaded(options(), llama_copy)
    assert loaded(options(trust_remote_code=True), llama_copy).card.vocab_size == 512
    assert loaded(options({"trust_remote_code": True}), llama_copy).card.vocab_size == 512


def test_weights_larger_than_the_memory_are_refused_with_both_numbers():
    with pytest.raises(OutOfMemoryError, match=r"need 3\.0 GiB .* there are 2\.0 GiB"):
        weights.require_memory(3 * 2**30, 2 * 2**30)
    weights.require_memory(2**30, 2**30)
    assert weights.memory_bytes() > 2**30


def test_weights_that_are_there_already_take_their_memory(options: Options, tiny_models: Build):
    with pytest.raises(OutOfMemoryError, match=r"need 0\.0 GiB .* there are 0\.0 GiB"):
        load(options(), tiny_models("llama"), beside_bytes=weights.memory_bytes())


def test_a_failed_load_leaves_nothing_in_memory(
    options: Options, tiny_models: Build, llama_copy: Path
):
    """Even while the error, with its traceback, is still held."""
    (llama_copy / "tokenizer.json").write_text("{}")
    gc.collect()
    before = mx.get_active_memory()
    with pytest.raises(LoadError) as failure:
        loaded(options(dtype="float16"), llama_copy)
    assert failure.value.__traceback__ is not None
    assert mx.get_active_memory() == before
    assert loaded(options(), tiny_models("llama")).card.vocab_size == 512
