from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

from backend.config import ModelOptions
from backend.core.prompt import Message
from backend.model.loader import load
from scripts.tiny_models import FAMILIES, build, build_llama, main

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_generates(
    family: str, options: Callable[..., ModelOptions], tiny_models: Callable[[str], Path]
):
    import mlx_lm

    directory = tiny_models(family)
    model = load(options(), directory, cancelled=lambda: False)
    prompt = model.template.render([Message(role="user", content="hello")], [], {})
    ids = model.tokenizer.encode(prompt, adds_special=False)
    _, upstream = mlx_lm.load(str(directory))
    generated = [
        response.token
        for response in mlx_lm.stream_generate(model.network, upstream, ids, max_tokens=3)
    ]
    assert all(0 <= token_id < model.card.vocab_size for token_id in generated)
    assert model.card.model_type == family


def test_the_same_seed_gives_the_same_weights(tmp_path: Path):
    def weights(name: str, seed: int) -> dict[str, mx.array]:
        directory = build("llama", tmp_path / name, seed=seed, dtype="bfloat16")
        return mx.load(str(directory / "model.safetensors"))

    one, two, other = weights("one", 1), weights("two", 1), weights("other", 2)
    assert all(mx.array_equal(one[name], two[name]) for name in one)
    name = "model.embed_tokens.weight"
    assert one[name].dtype == mx.bfloat16
    assert not mx.array_equal(one[name], other[name])


def test_every_id_of_a_large_vocabulary_has_a_text(
    options: Callable[..., ModelOptions], tmp_path: Path
):
    directory = build_llama(tmp_path, hidden=64, layers=1, vocab=700)
    model = load(options(), directory, cancelled=lambda: False)
    assert model.card.vocab_size == 700
    assert all(map(model.tokenizer.token_bytes, range(700)))
    assert model.tokenizer.decode([699]) == " word699"


def test_the_command_line_writes_a_model(tmp_path: Path):
    result = CliRunner().invoke(main, ["llama", str(tmp_path / "made")])
    assert result.exit_code == 0
    assert (tmp_path / "made" / "model.safetensors").exists()
