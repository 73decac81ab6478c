"""Imports mlx-lm; every other module that needs it imports it here first.

Some of its modules do not need MLX: `mlx_lm_part` loads them without the package, which does;
likewise `transformers_part`.
"""

import importlib
import importlib.util
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from common.remedies import versions_of

# Upstream is untyped: an MLX module, and a tokenizer of transformers.
Network: TypeAlias = Any
HfTokenizer: TypeAlias = Any

_PACKAGE = "mlx_lm"
_FAMILIES = ("mlx_lm.models.", "mlx_vlm.models.", "mlx_vlm.speculative.drafters.")
# An attribute of a replacement: upstream's function.
_REPLACED = "replaced_upstream_function"


def import_mlx_lm() -> ModuleType:
    """Import `mlx_lm.utils` without letting it change the limit of open files.

    mlx-lm 0.32 lowers RLIMIT_NOFILE to 2048 of 4096 on import, and a server cannot raise it again.
    """
    set_limit = resource.setrlimit
    resource.setrlimit = _keep_limit
    try:
        return importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = set_limit


def _keep_limit(kind: int, limits: tuple[int, int], /) -> None:
    """Replace `resource.setrlimit`; does nothing."""


@cache
def mlx_lm_part(name: str) -> ModuleType:
    """Return a module of mlx-lm.

    Args:
        name: Dotted name below the package; the module must not import MLX.

    Raises:
        ModuleNotFoundError: There is no such module.
    """
    whole = f"{_PACKAGE}.{name}"
    if whole in sys.modules:
        return sys.modules[whole]
    path = _package_directory().joinpath(*name.split(".")).with_suffix(".py")
    is_named = all(part.isidentifier() for part in name.split("."))
    if not is_named or not path.is_file():
        raise ModuleNotFoundError(f"No module named {whole!r}", name=whole)
    # Under a different name: the package itself may be imported later.
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path} cannot be imported", name=whole)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def transformers_part(name: str) -> ModuleType:
    """Return a module of transformers, whose package alone takes half a second to import.

    While it is not imported, the module is loaded without it; it may be imported later. Not while
    other threads import it.

    Args:
        name: Dotted name below the package.
    """
    whole = f"transformers.{name}"
    if "transformers" in sys.modules:
        return importlib.import_module(whole)
    known = set(sys.modules)
    try:
        for package in _packages_of(whole):
            spec = importlib.util.find_spec(package)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            # Has the package's path, but runs nothing of it.
            sys.modules[package] = importlib.util.module_from_spec(spec)
        return importlib.import_module(whole)
    finally:
        for each in set(sys.modules) - known:
            if each.partition(".")[0] == "transformers":
                del sys.modules[each]


def _packages_of(name: str) -> Iterator[str]:
    """Yield the packages of a module, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _package_directory() -> Path:
    # Finds the package without importing it.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {_PACKAGE!r}", name=_PACKAGE)
    return Path(spec.submodule_search_locations[0])


def reroute(name: str, sources: Iterable[str], route: Callable[[Any], Any]) -> None:
    """Replace a function in its modules and in those families that import it by name.

    Args:
        sources: The modules that define it; those that are not imported are left out.
        route: Returns the replacement of an upstream function; not called for a replacement.
    """
    # Another thread may be importing.
    known = sys.modules.copy()
    modules = {name: module for name, module in known.items() if name.startswith(_FAMILIES)}
    routes = {}
    for source in sources:
        if source in modules:
            current = getattr(modules[source], name)
            if not hasattr(current, _REPLACED):
                upstream, current = current, route(current)
                setattr(current, _REPLACED, upstream)
            routes[getattr(current, _REPLACED)] = current
    for module in modules.values():
        replacement = routes.get(getattr(module, name, None))
        if replacement is not None:
            setattr(module, name, replacement)


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
