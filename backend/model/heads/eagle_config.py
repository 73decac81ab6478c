"""Reads the config.json of an EAGLE-3 head, in either of its two layouts.

In the layout of Speculators the fields of the layer are in `transformer_layer_config`; in that of
SGLang they are at the top level, and fields of the head alone may be in `eagle_config`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from backend.errors import UnsupportedModelError

_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER, _EXTRAS = "transformer_layer_config", "eagle_config"
# The number of layers whose states the network takes.
_TAPS = 3


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json belongs to an EAGLE-3 head."""
    names = (config.get("model_type"), config.get("speculators_model_type"))
    architectures = config.get("architectures") or ()
    return "eagle3" in names or any("eagle3" in str(name).lower() for name in architectures)


def layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the head's own layer."""
    found: Mapping[str, Any] = config.get(_LAYER) or config
    return found


def head_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the fields of mlx-vlm's `Eagle3Config`.

    Args:
        config: The config.json of the head.
        layers: The number of layers of the model.

    Raises:
        UnsupportedModelError: The model has too few, or the head is of another kind.
    """
    extras = config.get(_EXTRAS) or {}
    if extras.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            "the EAGLE-3 head reads the last hidden states only (use_aux_hidden_state is false)"
        )
    layer = layer_config(config)
    if layer.get("kv_lora_rank"):
        raise UnsupportedModelError("the EAGLE-3 head has MLA (kv_lora_rank)")
    ids = _boundaries(config.get(_IDS) or extras.get(_IDS), layers)
    return {
        **extras,
        **config,
        "draft_vocab_size": config.get("draft_vocab_size") or layer.get("vocab_size"),
        _LAYER: dict(layer),
        "target_layer_ids": ids,
        "capture_layer_ids": [each - 1 for each in ids],
    }


def _boundaries(named: Sequence[int] | None, layers: int) -> list[int]:
    """Return the counts of layers of the model after which the head reads the states."""
    ids = list(named or (2, layers // 2, layers - 3))
    # Some trainers list the layers whose outputs are read, counted from 0; the first is 1.
    first = 1 if named and ids[0] == 1 else 0
    found = [each + first for each in ids]
    if len(found) != _TAPS or not all(0 < each <= layers for each in found):
        raise UnsupportedModelError(
            f"the EAGLE-3 head reads states after layers {', '.join(map(str, found))}, "
            f"and the model has {layers}"
        )
    return found
