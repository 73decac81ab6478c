"""Tells which library supports a model type, and how to report an unsupported one."""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from backend.model.checkpoint.upstream import import_mlx_lm
from common.versions import versions_of

LIBRARIES = ("mlx-lm", "mlx-vlm")

_MODULE_NAME = re.compile(r"[A-Za-z0-9_-]+")


def is_known_to_mlx_lm(config: Mapping[str, Any]) -> bool:
    """Tell whether mlx-lm has code for the model described by a config.json."""
    if "model_file" in config:
        return True
    utils = import_mlx_lm()
    kind = config["model_type"]
    own = getattr(utils, "MODEL_ARCHITECTURE_REMAPPING", {})
    named = (own.get((kind, architecture)) for architecture in config.get("architectures") or ())
    found = next(filter(None, named), None) or utils.MODEL_REMAPPING.get(kind, kind)
    return _exists("mlx_lm.models", found)


def is_installed(module: str) -> bool:
    """Tell whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def is_known_to_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Tell whether mlx-vlm is installed and has code for the model described by a config.json."""
    if not is_installed("mlx_vlm"):
        return False
    # mlx-lm first, through `import_mlx_lm`: mlx-vlm may import it.
    import_mlx_lm()
    from mlx_vlm.utils import get_model_type

    return _exists("mlx_vlm.models", get_model_type(dict(config)))


def unknown_type(kind: str) -> str:
    """Return the message for a model type that neither library supports."""
    return (
        f"is of the model type {kind!r}, which none of {versions_of(LIBRARIES)} supports: "
        f"a newer version may (pip install --upgrade {' '.join(LIBRARIES)})"
    )


def _exists(package: str, name: str) -> bool:
    if not _MODULE_NAME.fullmatch(name):
        return False
    return importlib.util.find_spec(f"{package}.{name}") is not None
