"""Creates an accurate draft model: the first layers of a model whose other layers add little."""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# The weights by which a llama layer adds to the residual stream.
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def split_off(model: Path, draft: Path, *, layers: int = 1, rest: float = 0.0) -> Path:
    """Change a llama so that a draft model agrees with it; write that and return its directory.

    Args:
        model: A directory with one weight file, which is changed.
        draft: The new directory.
        layers: Of the draft model.
        rest: The contribution of the model's other layers, relative to before; with 0 the two agree
            on every token.
    """
    weights = {}
    for name, weight in mx.load(str(model / "model.safetensors")).items():
        found = _LAYER.fullmatch(name)
        is_damped = found and int(found[1]) >= layers and found[2] in _OUTPUTS
        weights[name] = weight * rest if is_damped else weight
    mx.eval(weights)
    shutil.copytree(model, draft)
    for directory, most in ((model, None), (draft, layers)):
        kept = {name: w for name, w in weights.items() if _is_within(name, most)}
        path = str(directory / "model.safetensors")
        mx.save_safetensors(path, kept, metadata={"format": "mlx"})
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return draft


def _is_within(name: str, layers: int | None) -> bool:
    found = _LAYER.fullmatch(name)
    return layers is None or found is None or int(found[1]) < layers
