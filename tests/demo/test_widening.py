"""A model that is made larger says the same."""

import json

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models import qwen3

from backend.demo import MODEL_DIR
from scripts.demo_model.widening import widened

pytestmark = pytest.mark.mlx


def test_a_wider_and_deeper_model_gives_the_same_logits():
    weights = {
        name: weight.astype(mx.float32)
        for name, weight in mx.load(str(MODEL_DIR / "model.safetensors")).items()
    }
    config = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    wide_config, wide_weights = widened(config, weights, hidden=256, layers=5)
    model = load(str(MODEL_DIR))[0]
    model.set_dtype(mx.float32)
    wide = qwen3.Model(qwen3.ModelArgs.from_dict(wide_config))
    wide.load_weights(list(wide_weights.items()))
    tokens = mx.array([[(37 * n) % 600 for n in range(40)]])
    sizes = [sum(weight.size for weight in each.values()) for each in (weights, wide_weights)]
    assert sizes[1] > 4 * sizes[0]
    assert mx.allclose(wide(tokens), model(tokens), rtol=1e-4, atol=1e-3).item()
