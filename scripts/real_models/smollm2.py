"""SmolLM2-135M-Instruct: a Llama, whose tokenizer splits numbers into single digits."""

from typing import Any

import numpy as np

from scripts.real_models import checkpoint
from scripts.real_models.source import Source

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def tensors(source: Source) -> dict[str, np.ndarray]:
    """Return the weights under the names and in the order of rows of the hub's Llama."""
    return dict(_renamed(source, name, weight) for name, weight in source.tensors.items())


def _renamed(source: Source, name: str, weight: np.ndarray) -> tuple[str, np.ndarray]:
    if name in _OTHERS:
        return _OTHERS[name], weight
    _, layer, part, _ = name.split(".")
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(part)
    if heads:
        weight = _halves_apart(weight, source.of(heads))
    return f"model.layers.{layer}.{_PARTS[part]}.weight", weight


def _halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """Separate the two halves of a head that RoPE turns, which llama.cpp interleaves."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def files(source: Source) -> dict[str, Any]:
    """Return the checkpoint's JSON files by their names without suffix."""
    return checkpoint.described(
        source, _network(source), _tokenizer(source), _tokenizer_config(source)
    )


def _network(source: Source) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": source.of("vocab_size"),
        "mlp_bias": False,
    }


def _tokenizer(source: Source) -> dict[str, Any]:
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": source.added_tokens,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [digits, {**bytes_of, "use_regex": True}],
        },
        "post_processor": None,
        "decoder": {**bytes_of, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: index for index, text in enumerate(source.vocabulary("tokens"))},
            "merges": source.vocabulary("merges"),
        },
    }


def _tokenizer_config(source: Source) -> dict[str, Any]:
    return {
        # The published class: transformers gives it another pre-tokenizer than the file has.
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "chat_template": source.metadata["tokenizer.chat_template"],
    }
