"""Model code for checkpoints of families whose towers have a fixed size in mlx-vlm."""

from collections.abc import Mapping

_GEMMA3N = """\
from mlx_vlm.models.gemma3n import *
from mlx_vlm.models.gemma3n import Model as Whole
from mlx_vlm.models.gemma3n import vision

STAGES = [
    [vision._er(3, 16, 2)],
    [vision._uir(3, 5, 16, 2, 2.0)],
    [vision._uir(5, 5, 32, 2, 2.0), vision._mmqa(2, 16, 2), vision._uir(0, 0, 32, 1, 2.0)],
    [vision._uir(5, 5, 32, 2, 2.0), vision._mmqa(2, 16, 1), vision._uir(0, 0, 32, 1, 2.0)],
]


def Model(config):
    model, stages = Whole(config), vision.gemma3n_mobilenet_def
    tower = model.vision_tower.timm_model
    vision.gemma3n_mobilenet_def = lambda: STAGES
    try:
        tower.num_features, tower.blocks = tower.build()
    finally:
        vision.gemma3n_mobilenet_def = stages
    width = config.vision_config.hidden_size
    tower.msfa = vision.MobileNetV5MultiScaleFusionAdapter([64], width, (16, 16))
    return model
"""
_FASTVLM = """\
from mlx_vlm.models.fastvlm import *
from mlx_vlm.models.fastvlm import VisionConfig as Whole


class VisionConfig(Whole):
    layers = [1, 1, 1, 1, 1]
    embed_dims = [32, 32, 64, 64, 128]
"""
_OCR = """\
from mlx_vlm.models.FAMILY import *
from mlx_vlm.models.FAMILY import FAMILY as code


def Model(config):
    whole = code.SAMViTConfig
    code.SAMViTConfig = lambda: whole(width=32, layers=1, heads=2, global_attn_indexes=())
    try:
        model = code.Model(config)
    finally:
        code.SAMViTConfig = whole
    if hasattr(model.vision_model, "qwen2_encoder"):
        del model.vision_model.qwen2_encoder.layers[1:]
    return model
"""

# By family.
SMALL_TOWERS: Mapping[str, str] = {
    "gemma3n": _GEMMA3N,
    "fastvlm": _FASTVLM,
    **{name: _OCR.replace("FAMILY", name) for name in ("deepseekocr", "deepseekocr_2")},
}
