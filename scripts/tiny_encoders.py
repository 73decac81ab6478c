"""Build tiny encoders with random weights: embedders, cross-encoders and models that label text."""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from scripts.tiny_models import PADDING, VOCAB_SIZE, train_bpe

POSITIONS = 128

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
_SYLLABLES = [a + b for a in "bdklmnprst" for b in "aeiou"]

_COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_ROBERTA: Mapping[str, Any] = {
    "max_position_embeddings": POSITIONS + 2,
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
# Each type's additions to the common shape, and its weight prefix in the checkpoint.
TYPES: Mapping[str, Mapping[str, Any]] = {
    "bert": {"type_vocab_size": 2, "pad_token_id": 0, "hidden_act": "gelu"},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "llama_bidirec": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "modernbert": {"num_hidden_layers": 4, "local_attention": 16, "pad_token_id": 0},
}
PRIVATE = ("email", "person")
# A label depends on eight tokens ahead and back.
_PRIVACY: Mapping[str, Any] = {
    **_COMMON,
    "model_type": "openai_privacy_filter",
    "architectures": ["OpenAIPrivacyFilterForTokenClassification"],
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": POSITIONS // 32,
    },
    "pad_token_id": 0,
    "eos_token_id": 0,
}
# The number that a step between labels adds.
_BIASES = {
    "background_stay": -0.5,
    "background_to_start": 0.25,
    "inside_to_continue": 0.75,
    "inside_to_end": -0.25,
    "end_to_background": 0.5,
    "end_to_start": -1.0,
}
# A DeBERTa in a folder of its own, and heads on it.
_DEBERTA: Mapping[str, Any] = {
    **_COMMON,
    "model_type": "deberta-v2",
    "hidden_act": "gelu",
    "position_buckets": 16,
    "max_relative_positions": 32,
    "pad_token_id": 0,
}
_EXTRACTOR: Mapping[str, Any] = {
    "model_type": "extractor",
    "architectures": ["BoundaryExtractor"],
    "architecture": "boundary",
    "max_len": POSITIONS,
    "token_pooling": "first",
    "boundary_head": {
        "boundary_dim": 32,
        "pair_dim": 32,
        "content_dim": 16,
        "boundary_attention_layers": 1,
        "boundary_attention_heads": 2,
        "pool_boundary_top_k": 12,
        "pool_size": 48,
        "min_pool_per_query": 4,
    },
}
_DECIDER: Mapping[str, Any] = {
    "model_type": "laya",
    "architectures": ["LayaModel"],
    "head_layers": 1,
    "encoder_config": {**_COMMON, **TYPES["modernbert"], "model_type": "modernbert"},
    "decision_config": {
        "max_len": 2 * POSITIONS,
        "head_max_len": POSITIONS,
        "temperature": [0.7, 1.5, "none"],
        "temperature_by_options": {"choice:3-5": 9.0, "score:2": 0.8},
    },
}
_EXTRACTOR_MARKS = (
    *("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
    *("[SEP_TEXT]", "[P]", "[E]", "[L]", "[DESCRIPTION]"),
)
_MODULES = {"roberta": "xlm_roberta", "xlm-roberta": "xlm_roberta"}
_BERT_WORDS = ("[CLS]", "[SEP]", ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
_ROBERTA_WORDS = ("<s>", "</s>", ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))


def build_encoder(model_type: str, directory: Path) -> Path:
    """Write a tiny encoder of a type in `TYPES`; the directory is created if necessary."""
    return _build(model_type, directory, "Model", "Model")


def build_cross_encoder(model_type: str, directory: Path) -> Path:
    """Write a tiny cross-encoder with one label."""
    return _build(model_type, directory, "SequenceClassificationModel", "ForSequenceClassification")


def build_token_classifier(directory: Path, labels: Sequence[str]) -> Path:
    """Write a tiny BERT that labels tokens."""
    classes = "TokenClassificationModel", "ForTokenClassification"
    return _build("bert", directory, *classes, labels)


def build_privacy_filter(directory: Path, labels: Sequence[str] = ()) -> Path:
    """Write a tiny OpenAI Privacy Filter: experts fused, paths calibrated, as it is published.

    Args:
        directory: Created if necessary.
        labels: Of tokens; those of BIOES for the groups of `PRIVATE` if empty.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(), pad_token=PADDING)
    tokenizer.save_pretrained(str(directory))
    tags = labels or ["O", *(f"{place}-{group}" for group in PRIVATE for place in "BIES")]
    config = {**_PRIVACY, "id2label": {str(i): label for i, label in enumerate(tags)}}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    biases = {f"transition_bias_{name}": bias for name, bias in _BIASES.items()}
    calibration = {"operating_points": {"default": {"biases": biases}}}
    path = directory / "viterbi_calibration.json"
    path.write_text(json.dumps(calibration), encoding="utf-8")
    return save(directory, dict(_fused(drawn_for("openai_privacy_filter", config))))


def drawn_for(family: str, config: Mapping[str, Any]) -> Mapping[str, mx.array]:
    """Return random weights of a family's network in mlx-vlm."""
    module = importlib.import_module(f"mlx_vlm.models.{family}")
    return drawn(module.Model(module.ModelConfig.from_dict(config)))


def save(directory: Path, weights: Mapping[str, mx.array]) -> Path:
    """Write weights as torch does; return the directory."""
    path = directory / "model.safetensors"
    mx.save_safetensors(str(path), dict(weights), metadata={"format": "pt"})
    return directory


def _fused(weights: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """Yield weights as transformers names them: gates and ups of all experts in one."""
    for name, weight in weights.items():
        if ".up_proj." in name:
            continue
        if ".gate_proj." in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            name = name.replace("gate_proj", "gate_up_proj")
            weight = mx.concatenate([weight, up], axis=1)
        if ".experts." in name:
            stem, _, last = name.rpartition(".")
            yield (stem, weight.swapaxes(-1, -2)) if last == "weight" else (f"{stem}_bias", weight)
        else:
            yield name, weight


def build_extractor(directory: Path) -> Path:
    """Write a tiny GLiNER 2.5, its encoder's settings and weights named as they are published."""
    inner = directory / "encoder_config"
    inner.mkdir(parents=True, exist_ok=True)
    settings = {**_DEBERTA, "vocab_size": _write_unigrams(directory)}
    (inner / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(_EXTRACTOR), encoding="utf-8")
    config = {**_EXTRACTOR, "encoder_config": settings}
    drawn = drawn_for("gliner2_5", config)
    return save(directory, {_published(name): weight for name, weight in drawn.items()})


def build_decider(directory: Path) -> Path:
    """Write a tiny Laya, its head named as in torch."""
    directory.mkdir(parents=True, exist_ok=True)
    inner = {
        **_DECIDER["encoder_config"],
        "vocab_size": _write_tokenizer(directory, is_roberta=False),
    }
    config = {**_DECIDER, "encoder_config": inner}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return save(directory, dict(_packed(drawn_for("laya", config))))


def _packed(weights: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """Yield weights as torch names them: projections of attention in one, sequences by index."""
    for name, weight in weights.items():
        if ".query_proj." in name:
            parts = [name.replace("query", part) for part in ("query", "key", "value")]
            packed = name.replace(".attention.query_proj.", ".self_attn.in_proj_")
            yield packed, mx.concatenate([weights[part] for part in parts])
        elif name.startswith("head.") and ".attention.out_proj." in name:
            yield name.replace(".attention.", ".self_attn."), weight
        elif name.startswith(("scorer.", "act_head.")):
            yield name.replace(".layers.", ".", 1), weight
        elif ".key_proj." not in name and ".value_proj." not in name:
            yield name, weight


def _published(name: str) -> str:
    if not name.startswith("encoder."):
        return name
    name = name.replace(".encoder.layers.", ".encoder.layer.").replace(".self_attn.", ".self.")
    return name.replace(".layer_norm.", ".LayerNorm.")


def _write_unigrams(directory: Path) -> int:
    """Write a tokenizer of letters and syllables as DeBERTa's; return its size."""
    pieces = ["\u2581", *_LETTERS, *_SYLLABLES, "(", ")"]
    pieces += [f"\u2581{piece}" for piece in (*_LETTERS, *_SYLLABLES)]
    vocabulary = [(word, 0.0) for word in _EXTRACTOR_MARKS]
    vocabulary += [(piece, -4.0 + len(piece) / 2) for piece in pieces]
    unknown = _EXTRACTOR_MARKS.index("[UNK]")
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    ends = (("[SEP]", 2), ("[CLS]", 1))
    tokenizer.post_processor = processors.BertProcessing(*ends)
    tokenizer.add_special_tokens(list(_EXTRACTOR_MARKS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")},
    ).save_pretrained(str(directory))
    return len(vocabulary)


def _build(
    model_type: str,
    directory: Path,
    class_name: str,
    architecture: str,
    labels: Sequence[str] = ("LABEL_0",),
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    is_roberta = "roberta" in model_type
    vocab_size = _write_tokenizer(directory, is_roberta=is_roberta)
    config = {
        **_COMMON,
        **TYPES[model_type],
        "model_type": model_type,
        "architectures": [f"Tiny{architecture}"],
        "vocab_size": vocab_size,
    }
    if class_name != "Model":
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    name = _MODULES.get(model_type, model_type)
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    network = getattr(module, class_name)(
        module.ModelConfig.from_dict({**config, "num_labels": len(labels)})
    )
    _save_weights(network, directory / "model.safetensors")
    return directory


def _save_weights(network: Any, path: Path) -> None:  # noqa: ANN401 - untyped upstream
    mx.save_safetensors(str(path), drawn(network), metadata={"format": "mlx"})


def drawn(network: Any) -> dict[str, mx.array]:  # noqa: ANN401 - untyped upstream
    """Draw weights large enough for every token to matter."""
    key = mx.random.key(0)
    weights = {}
    for name, weight in sorted(tree_flatten(network.parameters())):
        key, subkey = mx.random.split(key)
        scale = 1.5 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
        offset = 1.0 if weight.ndim == 1 and name.endswith("weight") else 0.0
        weights[name] = offset + mx.random.normal(weight.shape, scale=scale, key=subkey)
    mx.eval(weights)
    return weights


def _write_tokenizer(directory: Path, *, is_roberta: bool) -> int:
    """Write a WordPiece tokenizer of letters and syllables; return the size of its vocabulary."""
    begin, end, special = _ROBERTA_WORDS if is_roberta else _BERT_WORDS
    pieces = [*_LETTERS, *_SYLLABLES]
    words = [*special, *pieces, *(f"##{piece}" for piece in pieces)]
    vocabulary = {word: i for i, word in enumerate(words)}
    unknown, padding = special[3 if is_roberta else 1], special[1 if is_roberta else 0]
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pair = (end, vocabulary[end]), (begin, vocabulary[begin])
    post_processor = processors.RobertaProcessing if is_roberta else processors.BertProcessing
    tokenizer.post_processor = post_processor(*pair)
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    inputs = ["input_ids", "attention_mask"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": inputs if is_roberta else [*inputs, "token_type_ids"],
        "cls_token": begin,
        "sep_token": end,
        "pad_token": padding,
        "unk_token": unknown,
        "mask_token": special[-1],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return len(words)
