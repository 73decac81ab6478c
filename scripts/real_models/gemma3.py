"""Gemma 3 270M, the base model: five layers with a window to each without, a large vocabulary."""

from typing import Any

import numpy as np

from scripts.real_models import checkpoint
from scripts.real_models.source import NORMAL, USER_DEFINED, Source

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYERS_PER_FULL_ATTENTION = 6
_SPACE = "▁"
_SETTINGS: dict[str, Any] = {
    "tokenizer_class": "GemmaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "spaces_between_special_tokens": False,
}


def tensors(source: Source) -> dict[str, np.ndarray]:
    """Return the weights under the hub's names; norms around zero, not one."""
    return {
        _name(name): weight - 1 if name.endswith("norm.weight") else weight
        for name, weight in source.tensors.items()
    }


def _name(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


def files(source: Source) -> dict[str, Any]:
    """Return the checkpoint's JSON files by their names without suffix."""
    return checkpoint.described(source, _network(source), _tokenizer(source), _SETTINGS)


def _network(source: Source) -> dict[str, Any]:
    layers = range(1, source.of("block_count") + 1)
    full = [layer % _LAYERS_PER_FULL_ATTENTION == 0 for layer in layers]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": source.of("attention.key_length"),
        "query_pre_attn_scalar": source.of("attention.key_length"),
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "sliding_window": source.of("attention.sliding_window"),
        "sliding_window_pattern": _LAYERS_PER_FULL_ATTENTION,
        "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
        "vocab_size": len(source.vocabulary("tokens")),
    }


def _tokenizer(source: Source) -> dict[str, Any]:
    texts = source.vocabulary("tokens")
    bos = texts[source.vocabulary("bos_token_id")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": source.added_tokens,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": _starting_with(bos, source.vocabulary("bos_token_id")),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": texts[source.vocabulary("unknown_token_id")],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(texts)},
            "merges": _merges(source),
        },
    }


def _starting_with(text: str, index: int) -> dict[str, Any]:
    start = [{"SpecialToken": {"id": text, "type_id": n}} for n in (0, 1)]
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [start[0], first],
        "pair": [start[0], first, start[1], second],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }


def _merges(source: Source) -> list[list[str]]:
    """Return the merges that a vocabulary with scores stands for, the best score first.

    A token may come from each of its cuts into two tokens; those of lower ids go first.
    """
    kinds = source.vocabulary("token_type")
    index = {
        text: number
        for number, text in enumerate(source.vocabulary("tokens"))
        if kinds[number] in (NORMAL, USER_DEFINED)
    }
    scores = source.vocabulary("scores")
    ranked: list[tuple[float, int, int, int]] = []
    for text, number in index.items():
        for cut in range(1, len(text)):
            left, right = index.get(text[:cut]), index.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[number], number, left, right))
    texts = source.vocabulary("tokens")
    return [[texts[left], texts[right]] for _, _, left, right in sorted(ranked)]
