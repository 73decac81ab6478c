"""LoRA adapters for the tiny llama, in mlx-lm's format."""

import json
from pathlib import Path

import mlx.core as mx

RANK, SCALE = 2, 4.0
PROJECTIONS = ("self_attn.q_proj", "self_attn.v_proj")


def write_adapter(directory: Path, *, seed: int, width: int = 64) -> Path:
    """Write a random adapter for the attention of the tiny llama's two layers."""
    directory.mkdir()
    key = mx.random.key(seed)
    outputs = {"self_attn.q_proj": width, "self_attn.v_proj": width // 2}
    weights = {}
    for layer in range(2):
        for name in PROJECTIONS:
            key, first, second = mx.random.split(key, 3)
            path = f"model.layers.{layer}.{name}"
            weights[f"{path}.lora_a"] = mx.random.normal((width, RANK), key=first)
            weights[f"{path}.lora_b"] = mx.random.normal((RANK, outputs[name]), key=second)
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.5, "keys": PROJECTIONS}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
