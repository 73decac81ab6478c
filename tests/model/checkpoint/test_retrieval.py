import json
import re

import pytest

from backend.core.scoring import EmbeddingProfile, Pooling, RerankerKind
from backend.errors import LoadError
from backend.model.checkpoint.config_file import embedding_profile, reranker_kind


def write(directory, *, parts=("Transformer", "Pooling"), pooling=None):
    modules = [{"type": f"sentence_transformers.models.{part}"} for part in parts]
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.CLS),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": ["cls"]}, Pooling.CLS),
    ],
)
def test_the_checkpoint_says_how_it_pools(tmp_path, flag, pooling):
    write(tmp_path, pooling=flag)
    assert embedding_profile(tmp_path, "m", {}) == EmbeddingProfile(pooling=pooling)


def test_a_normalize_module_normalises(tmp_path):
    write(tmp_path, parts=("Transformer", "Pooling", "Normalize"))
    profile = embedding_profile(tmp_path, "m", {})
    assert profile == EmbeddingProfile(pooling=Pooling.LAST, is_normalized=True)


@pytest.mark.parametrize(
    ("name", "pooling"), [("Qwen3-Embedding-0.6B", Pooling.LAST), ("Qwen3-0.6B", Pooling.MEAN)]
)
def test_without_files_the_name_tells_an_embedding_model(tmp_path, name, pooling):
    assert embedding_profile(tmp_path, name, {}).pooling is pooling


@pytest.mark.parametrize(
    ("flags", "parts", "config", "obstacle"),
    [
        ({"pooling_mode_max_tokens": True}, ("Pooling",), {}, "max"),
        ({"pooling_mode": ["mean", "cls"]}, ("Pooling",), {}, "mean and cls"),
        (None, ("Transformer", "Pooling", "Dense"), {}, "dense"),
        (None, ("Transformer",), {"use_bidirectional_attention": True}, "ahead"),
        (None, ("Transformer",), {"is_causal": False}, "ahead"),
    ],
)
def test_what_is_not_known_here_is_an_obstacle(tmp_path, flags, parts, config, obstacle):
    write(tmp_path, parts=parts, pooling=flags)
    assert obstacle in embedding_profile(tmp_path, "m", config).obstacle


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("modules.json", "{}", "is not a JSON array"),
        ("modules.json", "[1]", "has parts that are not objects"),
        ("1_Pooling/config.json", '{"pooling_mode": 3}', "pooling_mode is neither a name nor"),
        ("1_Pooling/config.json", '{"pooling_mode": [3]}', "pooling_mode is neither a name nor"),
    ],
)
def test_a_broken_file_fails_the_load(tmp_path, name, text, problem):
    write(tmp_path, pooling={})
    (tmp_path / name).write_text(text)
    with pytest.raises(LoadError, match=f"{re.escape(name)}:? {problem}"):
        embedding_profile(tmp_path, "m", {})


@pytest.mark.parametrize(
    ("name", "model_type", "kind"),
    [
        ("Qwen3-Reranker-0.6B-4bit", "qwen3", RerankerKind.QWEN3),
        ("Qwen3-0.6B", "qwen3", None),
        ("bge-reranker-v2-gemma", "gemma", None),
    ],
)
def test_a_reranker_is_known_by_its_type_and_name(name, model_type, kind):
    assert reranker_kind(name, {"model_type": model_type}) is kind
