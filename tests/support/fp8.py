"""Checkpoints that store weights in 8 bits with a scale for each block, as those of DeepSeek V3."""

import json
from pathlib import Path

import mlx.core as mx

_BLOCK = 128
_LARGEST = 448.0
# Those of layers that DeepSeek V3 stores in full.
_FULL = ("mlp.gate.weight", "eh_proj.weight", "embed_tokens.weight", "head.weight")
_FIELDS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [_BLOCK, _BLOCK],
}


def store_fp8(directory: Path) -> Path:
    """Change the layers of a checkpoint to 8 bits; return its directory."""
    path = directory / "model.safetensors"
    stored = {}
    for name, weight in mx.load(str(path)).items():
        is_packed = ".layers." in name and weight.ndim == 2 and not name.endswith(_FULL)
        stored |= _packed(name, weight) if is_packed else {name: weight.astype(mx.bfloat16)}
    mx.eval(stored)
    mx.save_safetensors(str(path), stored, metadata={"format": "pt"})
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["quantization_config"] = _FIELDS
    config_path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def _packed(name: str, weight: mx.array) -> dict[str, mx.array]:
    rows, columns = weight.shape
    down, right = -(-rows // _BLOCK), -(-columns // _BLOCK)
    padded = mx.pad(weight, ((0, down * _BLOCK - rows), (0, right * _BLOCK - columns)))
    blocks = padded.reshape(down, _BLOCK, right, _BLOCK)
    scales = mx.maximum(mx.abs(blocks).max(axis=(1, 3)), 1e-6) / _LARGEST
    scaled = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return {name: mx.to_fp8(scaled), f"{name}_scale_inv": scales}
