"""Tiny checkpoints with random weights of the text families of mlx-lm, and of mlx-vlm alone."""

import importlib
import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backend.model.checkpoint.upstream import import_mlx_lm

_TABLE = json.loads(Path(__file__).with_name("text_families.json").read_text(encoding="utf-8"))
TEXT_FAMILIES: Mapping[str, Mapping[str, Any]] = _TABLE["families"]

_VOCAB_SIZE = 320
_GAIN = 1.5
_EMBEDDING_SCALE = 0.3
_HEAD_NAMES = ("head", "embed_out", "unembed")
# Rows of an untied embedding that the model must not answer with.
_FAINT = 0.02
_END = "<|endoftext|>"
_PRINTABLE = [chr(code) for code in range(ord("!"), ord("~") + 1)]
_SPACE = "Ġ"
# Dialogues for the one family whose code needs a chat template.
_CHAT_TEMPLATES = {
    "muse_spark": "{% for m in messages %}{{m.role}}: {{m.content}}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
}


def text_config(family: str) -> dict[str, Any]:
    """Return the config.json of a tiny model: the family's own fields on common sizes."""
    row = TEXT_FAMILIES[family]
    own: dict[str, Any] = deepcopy(row["config"])
    module = row.get("module", family)
    arguments = inspect.signature(_arguments_class(module, text_library(family))).parameters
    nested = "text_config" in own and module != "muse_glimmer"
    common = {} if nested else _TABLE["defaults"]
    config = {name: value for name, value in common.items() if name in arguments}
    if "vocab_size" in arguments:
        config["vocab_size"] = _VOCAB_SIZE
    return {**config, "model_type": module, **own}


def build_text_model(
    family: str,
    directory: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of a family, with changes of its config.json, and return its directory.

    A character is a token, and replies are printable: text and tokens can be compared.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {**text_config(family), **(changes or {})}
    config["eos_token_id"] = _write_tokenizer(directory, family)
    weights = _draw(family, text_network(config, text_library(family)), getattr(mx, dtype), seed)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return directory


def text_library(family: str) -> str:
    """Return the library with code for a family."""
    return str(TEXT_FAMILIES[family].get("library", "mlx-lm"))


def text_network(config: Mapping[str, Any], library: str) -> nn.Module:
    """Return a network with its initial weights."""
    if library == "mlx-vlm":
        module = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
        return module.Model(module.ModelConfig.from_dict(deepcopy(dict(config))))
    utils = import_mlx_lm()
    model_class, arguments_class = utils._get_classes(dict(config))  # noqa: SLF001 (aliases)
    return model_class(arguments_class.from_dict(deepcopy(dict(config))))


def _arguments_class(module: str, library: str) -> type:
    """Return the class of a network's arguments."""
    import_mlx_lm()
    if library == "mlx-vlm":
        return importlib.import_module(f"mlx_vlm.models.{module}").ModelConfig
    return importlib.import_module(f"mlx_lm.models.{module}").ModelArgs


def _draw(family: str, network: nn.Module, dtype: mx.Dtype, seed: int) -> dict[str, mx.array]:
    mx.random.seed(seed)
    row = TEXT_FAMILIES[family]
    gain = row.get("gain", _GAIN)
    embedding_scale = row.get("embedding_scale", _EMBEDDING_SCALE)
    parameters = dict(tree_flatten(network.parameters()))
    tables = {name for name, weight in parameters.items() if _is_table(weight)}
    heads = {name for name in tables if _is_head(name)}
    embeddings = tables - heads

    def draw(name: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if weight.ndim < 2:
            return (weight.astype(mx.float32) + 0.05 * mx.random.normal(weight.shape)).astype(dtype)
        scale = embedding_scale if name in embeddings else gain * weight.shape[-1] ** -0.5
        drawn = mx.random.normal(weight.shape, scale=scale)
        answers = heads or {name for name in embeddings if "per_layer" not in name}
        if name in answers:
            rest = 0.0 if heads else _FAINT
            is_printable = mx.arange(_VOCAB_SIZE) < len(_PRINTABLE) + 1
            drawn *= mx.where(is_printable, 1.0, rest)[:, None]
        return drawn.astype(dtype)

    return {name: draw(name, weight) for name, weight in parameters.items()}


def _is_table(weight: mx.array) -> bool:
    return weight.ndim == 2 and weight.shape[0] == _VOCAB_SIZE


def _is_head(name: str) -> bool:
    return name.endswith("output.weight") or any(part in name for part in _HEAD_NAMES)


def _write_tokenizer(directory: Path, family: str) -> int:
    """Write a tokenizer of bytes, the printable ones first; return the end token's id."""
    first = [*_PRINTABLE, _SPACE]
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(first))
    vocabulary = {symbol: token_id for token_id, symbol in enumerate([*first, *rest])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _END,
        "model_max_length": 100_000,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if template := _CHAT_TEMPLATES.get(family):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return len(vocabulary)
