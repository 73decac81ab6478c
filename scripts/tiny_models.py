"""Build tiny random-weight models, one of each cache kind, for tests and benchmarks.

Their output is meaningless, but they are complete: config, weights, tokenizer and chat template, as
mlx-lm would load any model. The same arguments always give the same weights.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512

CHAT_TEMPLATE = Path(__file__).parent / "demo_model" / "chat_template.jinja"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TURN_END = _SPECIAL[2]
PADDING = _SPECIAL[0]
_MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)

# Letters of invented pieces, their maximum number, and possible prefixes.
_SCRIPTS = (
    (_LETTERS, 12, (" ", " ", "")),
    ("0123456789", 3, ("",)),
    ('{}[]()<>""\':;,.=+-*/\\_#\n\t    ', 5, ("", " ")),
    ("".join(map(chr, range(0x430, 0x450))), 10, (" ", "")),
    ("".join(map(chr, range(0x4E00, 0x5E00))), 3, ("",)),
)
_SCRIPT_SHARES = (65, 1, 8, 10, 16)

_COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

_GATED_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

_GEMMA3: Mapping[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
}

_QWEN3_NEXT: Mapping[str, Any] = {
    **_EXPERTS,
    **_GATED_DELTA,
    "model_type": "qwen3_next",
    "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
}

# Each family's additions to the common shape; the key is its `model_type`, unless overridden.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama_sliding": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "gemma3_text": _GEMMA3,
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 32},
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _GATED_DELTA,
    "mamba2": {
        "max_position_embeddings": None,
        "num_heads": 8,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
    "granitemoehybrid": {
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "model_max_length": 4096,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    # Heads wide enough to be quantised.
    "llama_wide": {"model_type": "llama", "head_dim": 64},
    "gemma3_wide": {**_GEMMA3, "head_dim": 32},
    "qwen3_next_wide": {**_QWEN3_NEXT, "head_dim": 32},
    "llama4": {
        "attention_bias": False,
        "attention_chunk_size": 32,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
    },
}
_NESTED = frozenset({"llama4"})  # families that keep their shape in `text_config`


def build(
    family: str, directory: Path, *, seed: int = 0, dtype: str = "float32", **changes: object
) -> Path:
    """Write a tiny model of `family`, a key of `FAMILIES`, and return its directory.

    Args:
        family: Its key.
        directory: Created if necessary.
        seed: Determines the weights.
        dtype: The name of an MLX data type.
        changes: Fields of its config.json.
    """
    shape = {**_COMMON, "model_type": family, **FAMILIES[family], **changes}
    config = {"model_type": family, "text_config": shape} if family in _NESTED else shape
    return _write(config, directory, seed=seed, dtype=dtype)


def build_llama(
    directory: Path,
    *,
    hidden: int,
    layers: int,
    vocab: int,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Write a llama of a chosen size, for benchmarks; every id of its `vocab` has a text.

    Args:
        directory: Created if necessary.
        hidden: Width, a multiple of 64: attention heads are 64 wide.
        layers: Number of blocks.
        vocab: At least `VOCAB_SIZE`.
        seed: Determines the weights.
        dtype: The name of an MLX data type.
    """
    heads = hidden // 64
    shape = {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "head_dim": 64,
        "vocab_size": vocab,
    }
    return _write(shape, directory, seed=seed, dtype=dtype)


def build_mamba2(
    directory: Path,
    *,
    hidden: int,
    layers: int,
    vocab: int,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Write a mamba2 of a chosen size, for benchmarks; the arguments are those of `build_llama`."""
    shape = {
        **_COMMON,
        **FAMILIES["mamba2"],
        "model_type": "mamba2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_heads": hidden // 32,
        "head_dim": 64,
        "state_size": 64,
        "vocab_size": vocab,
    }
    return _write(shape, directory, seed=seed, dtype=dtype)


def _write(config: dict[str, Any], directory: Path, *, seed: int, dtype: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    vocab = config.get("text_config", config)["vocab_size"]
    config["eos_token_id"] = _write_tokenizer(directory, vocab)
    weights = _draw_weights(config, seed=seed, dtype=getattr(mx, dtype))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory


def _draw_weights(config: Mapping[str, Any], *, seed: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Draw every matrix again: some modules start with zeros, which would leave experts tied."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    network = module.Model(module.ModelArgs.from_dict(dict(config)))

    def draw(weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return weight.astype(dtype)
        return mx.random.normal(weight.shape, dtype, scale=weight.shape[-1] ** -0.5)

    return dict(tree_flatten(tree_map(draw, network.parameters())))


def _write_tokenizer(directory: Path, vocab: int) -> int:
    """Write tokenizer and chat template; return the id that ends a turn."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(),
        eos_token=TURN_END,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )
    tokenizer.save_pretrained(str(directory))
    if vocab > VOCAB_SIZE:
        _fill_vocabulary(directory / "tokenizer.json", vocab)
    return int(tokenizer.eos_token_id)


def train_bpe(words: Sequence[str] = ()) -> Tokenizer:
    """Train byte-level BPE of `VOCAB_SIZE` on syllables, without unknown bytes in any text.

    Args:
        words: Texts that become single tokens, as far as there is room for them.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_SPECIAL) - len(_MARKERS) - len(_merges(words)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    syllables = [first + second for first in _LETTERS for second in "aeiou"]
    pairs = [a + b for a, b in zip(syllables, reversed(syllables), strict=True)]
    bpe.train_from_iterator([" ".join(pairs)], trainer)
    bpe = _with_words(bpe, words)
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in _MARKERS])
    return bpe


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges, in order, that make each word a token."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [spelled.pre_tokenize_str(word)[0][0] for word in words]
    found = ((piece[:end], piece[end]) for piece in pieces for end in range(1, len(piece)))
    return list(dict.fromkeys(found))


def _with_words(bpe: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Add merges before all others."""
    content = json.loads(bpe.to_str())
    model, merges = content["model"], _merges(words)
    for left, right in merges:
        model["vocab"].setdefault(left + right, len(model["vocab"]))
    model["merges"] = [*map(list, merges), *model["merges"]]
    return Tokenizer.from_str(json.dumps(content))


def _fill_vocabulary(path: Path, vocab: int) -> None:
    """Give every id up to `vocab` its own piece, which no text is encoded to."""
    content = json.loads(path.read_text(encoding="utf-8"))
    # Added tokens unknown to the model would be renumbered after the fillers.
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    known = content["model"]["vocab"]
    known.update(added)
    pieces = (piece for piece in _invented_pieces(Random(0)) if piece not in known)
    while len(known) < vocab:
        known[next(pieces)] = len(known)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _invented_pieces(rng: Random) -> Iterator[str]:
    """Yield the mixture of a large vocabulary forever: words, numbers, code, other scripts."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    while True:
        letters, longest, lead = rng.choices(_SCRIPTS, _SCRIPT_SHARES)[0]
        text = "".join(rng.choices(letters, k=rng.randint(2, longest)))
        yield spelled.pre_tokenize_str(rng.choice(lead) + text)[0][0]


@click.command()
@click.argument("family", type=click.Choice(sorted(FAMILIES)))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
def main(family: str, directory: Path, seed: int, dtype: str) -> None:
    """Write a tiny random-weight model of FAMILY to DIRECTORY."""
    click.echo(build(family, directory, seed=seed, dtype=dtype))


if __name__ == "__main__":
    main()
