"""Build tiny decision models with random weights: Laya's kin on an LFM2 or a Qwen3.5, and d1."""

import json
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from scripts import tiny_vision
from scripts.sweep.vision_models import SWEPT_VISION_FAMILIES
from scripts.tiny_encoders import drawn, drawn_for, save
from scripts.tiny_models import PADDING, TURN_END, train_bpe
from scripts.tiny_vision_qwen import QWEN3_5

POSITIONS = 512
# Letters of options: as many as there may be.
_LETTERS = tuple(islice(map("".join, product(string.ascii_uppercase, repeat=2)), 229))
_WORDS = ("yes", "no", "Yes", "No", "YES", "NO", " A", " B", "10", "11", "00", "01")
_DELIMITERS = (*(f"<|reserved_{i}|>" for i in range(7, 12)), "<|mask|>")
_BEGIN = "<|startoftext|>"
_LFM2: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 16,
}
_OMNI: Mapping[str, Any] = {
    "model_type": "d1_omni",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 8,
        "num_patches": 64,
    },
    "audio_config": {
        "feat_in": 16,
        "n_layers": 1,
        "d_model": 32,
        "subsampling_conv_channels": 8,
        "n_heads": 2,
        "residual_width": 16,
    },
    "projector_hidden_size": 64,
    "head_layers": 1,
    "max_length": POSITIONS,
    "temperatures": {"choice": 0.8, "choice:3-5": 2.0, "score:2": 1.5, "noul": 0.6},
}


def build_decider2(directory: Path, **decisions: object) -> Path:
    """Write a tiny decider 2, a Qwen3.5 that reads text only.

    Args:
        decisions: Settings added to those of its decisions.
    """
    size = _write_tokenizer(directory, _LETTERS)
    settings = {"temperature": 1.3, "temperature_by_type": {"noul": 0.7, "score": 2.0}}
    config = {
        **QWEN3_5.config["text_config"],
        "model_type": "decider2",
        "tie_word_embeddings": True,
        "vocab_size": size,
        "decision_config": settings | decisions,
    }
    return _write(directory, config, drawn_for("decider2", config))


def build_d1(directory: Path) -> Path:
    """Write a tiny d1, an LFM2 that sees."""
    lfm2 = SWEPT_VISION_FAMILIES["lfm2_vl"]
    shape = replace(lfm2, config={**lfm2.config, "model_type": "d1"}, words=_WORDS)
    return tiny_vision.build_shape(shape, directory)


def build_d1_omni(directory: Path) -> Path:
    """Write a tiny d1-omni, with its towers."""
    size = _write_tokenizer(directory, (), _DELIMITERS)
    config = {**_OMNI, "text_config": {**_LFM2, "vocab_size": size}}
    with mock_audio():
        return _write(directory, config, drawn_for("d1_omni", config))


@contextmanager
def mock_audio() -> Iterator[None]:
    """Have mlx-vlm build d1-omni where mlx-audio, which it needs for sounds, is missing."""
    names = ("mlx_audio", "mlx_audio.dsp")
    known = {name: sys.modules.get(name) for name in names}
    dsp = ModuleType(names[1])
    vars(dsp).update(dict.fromkeys(("hanning", "mel_filters", "stft"), len))
    sys.modules.update(zip(names, (ModuleType(names[0]), dsp), strict=True))
    try:
        yield
    finally:
        for name, module in known.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def build_clef(directory: Path) -> Path:
    """Write a tiny Clef, a Qwen3.5 that sees, and a head."""
    head = {"hidden_size": 64, "width": 64, "routing_layers": 1, "layers": 1, "heads": 2}
    config = {**QWEN3_5.config, "model_type": "clef", "head_config": head | {"feedforward": 96}}
    tiny_vision.build_shape(replace(QWEN3_5, config=config), directory)
    whole = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    network = tiny_vision.make_network(whole, directory)
    return save(directory, dict(drawn(network)))


def _write_tokenizer(directory: Path, words: Sequence[str], special: Sequence[str] = ()) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    bpe = train_bpe(words)
    bpe.add_special_tokens([AddedToken(each, normalized=False) for each in (*special, _BEGIN)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=_BEGIN, eos_token=TURN_END, pad_token=PADDING
    )
    tokenizer.save_pretrained(str(directory))
    return len(tokenizer)


def _write(directory: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> Path:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return save(directory, weights)
