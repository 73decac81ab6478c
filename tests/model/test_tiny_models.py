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

SHORT_PROMPT = 64  # tokens: tests with longer prompts go beyond every sliding window


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_generates(
    family: str, options: Callable[..., ModelOptions], tiny_models: Callable[[str], Path]
):
    import mlx_lm

    directory = tiny_models(family)
    model = load(options(), directory)
    prompt = model.template.render([Message(role="user", content="hello")], [], {})
    ids = model.tokenizer.encode(prompt, adds_special=False)
    _, upstream = mlx_lm.load(str(directory))
    generated = [
        response.token
        for response in mlx_lm.stream_generate(model.network, upstream, ids, max_tokens=3)
    ]
    assert all(0 <= token_id < model.card.vocab_size for token_id in generated)
    assert model.card.model_type == FAMILIES[family].get("model_type", family)


@pytest.mark.parametrize(
    ("family", "caches"),
    [
        ("llama", ["KVCache", "KVCache"]),
        ("llama_sliding", ["KVCache", "RotatingKVCache"] * 2),
        ("gemma3_text", ["RotatingKVCache", "RotatingKVCache", "KVCache"]),
        ("gpt_oss", ["RotatingKVCache", "KVCache"]),
        ("deepseek_v3", ["KVCache", "KVCache"]),
        ("deepseek_v32", ["CacheList", "CacheList"]),
        ("qwen3_next", ["ArraysCache", "KVCache", "ArraysCache"]),
        ("qwen3_5", ["ArraysCache", "KVCache", "ArraysCache"]),
        ("mamba2", ["ArraysCache", "ArraysCache"]),
        ("nemotron_h", ["ArraysCache", "KVCache", "ArraysCache"]),
        ("granitemoehybrid", ["ArraysCache", "KVCache", "ArraysCache"]),
        ("kimi_linear", ["ArraysCache", "KVCache", "ArraysCache"]),
        ("llama4", ["ChunkedKVCache", "ChunkedKVCache", "ChunkedKVCache", "KVCache"]),
    ],
)
def test_the_families_have_every_kind_of_cache(
    family: str, caches: list[str], tiny_models: Callable[[str], Path]
):
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    made = make_prompt_cache(mlx_lm.load(str(tiny_models(family)))[0])
    assert [type(cache).__name__ for cache in made] == caches
    windows = [cache.max_size for cache in made if hasattr(cache, "max_size")]
    assert all(window <= SHORT_PROMPT for window in windows)


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
    model = load(options(), directory)
    assert model.card.vocab_size == 700
    assert all(map(model.tokenizer.token_bytes, range(700)))
    assert len({model.tokenizer.decode([token_id]) for token_id in range(512, 700)}) == 188


def test_the_command_line_writes_a_model(tmp_path: Path):
    result = CliRunner().invoke(main, ["llama", str(tmp_path / "made")])
    assert result.exit_code == 0
    assert (tmp_path / "made" / "model.safetensors").exists()
