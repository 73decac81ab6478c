"""Tiny checkpoints with random weights of vision families of mlx-vlm."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.sweep.small_towers import SMALL_TOWERS
from scripts.tiny_vision import build_shape
from scripts.tiny_vision_configs import VISION_FAMILIES
from scripts.tiny_vision_family import VisionFamily


def _families() -> Mapping[str, VisionFamily]:
    """Return the families of the tests, and those of the table."""
    path = Path(__file__).with_name("vision_families.json")
    table: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    rows = {
        name: VisionFamily(
            **{**row, "further_tokens": tuple(row.get("further_tokens", ()))},
            code=SMALL_TOWERS.get(name, ""),
        )
        for name, row in table.items()
    }
    return {**VISION_FAMILIES, "gemma4_bidirectional": _seeing_both_ways("gemma4"), **rows}


def _seeing_both_ways(family: str) -> VisionFamily:
    """Return a family with bidirectional attention on images."""
    shape = VISION_FAMILIES[family]
    text = {**shape.config["text_config"], "use_bidirectional_attention": "vision"}
    return replace(shape, config={**shape.config, "text_config": text})


SWEPT_VISION_FAMILIES = _families()


def build_vision_model(family: str, directory: Path) -> Path:
    """Write a model of a family, a key of `SWEPT_VISION_FAMILIES`, and return its directory."""
    return build_shape(SWEPT_VISION_FAMILIES[family], directory)
