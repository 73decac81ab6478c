"""Imports mlx-lm; every other module that needs it imports it here first.

Some of its modules do not need MLX: `mlx_lm_part` loads them without the package, which does;
likewise `transformers_part`.
"""

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import msgspec

from common.directories import own_content, replace_file
from common.remedies import versions_of

# Upstream is untyped: an MLX module, and a tokenizer of transformers.
Network: TypeAlias = Any
HfTokenizer: TypeAlias = Any

_PACKAGE = "mlx_lm"
_FAMILIES = ("mlx_lm.models.", "mlx_vlm.models.", "mlx_vlm.speculative.drafters.")
# An attribute of a replacement: upstream's function.
_REPLACED = "replaced_upstream_function"
# Where transformers looks for its classes, and the function that does.
_SCANNER, _SCAN = "transformers.utils.import_utils", "define_import_structure"
INDEX_NAME = "transformers-index.json"
_MAX_INDEX_BYTES = 2**22

log = logging.getLogger(__name__)


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


def derived(kind: type, **members: Callable[..., Any]) -> type:
    """Return a subclass of one of upstream's, with other methods: for objects that exist."""
    return type(kind.__name__, (kind,), members | {"__module__": kind.__module__})


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


# Names of classes by module, by the packages that they need.
_Structure: TypeAlias = Mapping[frozenset[str], Mapping[str, set[str]]]


def index_transformers(state: Path) -> None:
    """Have transformers take from a file which classes its modules have.

    Each import reads 1,600 files twice for that, which takes half of its time. Call this before
    the import. Without the file, or after a change of theirs, they are read.

    Args:
        state: The directory of the file.
    """
    sys.meta_path.insert(0, _ScannerFinder(state / INDEX_NAME))


class _ScannerFinder(MetaPathFinder):
    """Finds the module that reads the files, and has it look into the index first."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _SCANNER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ScannerLoader(fullname, spec.loader.path, self._file)
        return spec


class _ScannerLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, file: Path) -> None:
        super().__init__(fullname, path)
        self._file = file

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        scan = getattr(module, _SCAN, None)
        if scan is not None:
            setattr(module, _SCAN, _Index(self._file, Path(self.path), scan).structure)


class _Found(msgspec.Struct):
    """The content of the file.

    Attributes:
        source: Changes with the files that were read.
        structures: Pairs of each structure, by the prefix of its modules' names.
    """

    source: str
    structures: dict[str, msgspec.Raw] = {}


class _Index:
    """The classes in the modules of all models."""

    def __init__(self, file: Path, scanner: Path, scan: Callable[..., _Structure]) -> None:
        self._file, self._scanner, self._scan = file, scanner, scan
        self._models = scanner.parents[1] / "models"

    def structure(self, module_path: str | Path, prefix: str | None = None) -> _Structure:
        """Return the classes in a directory, or in that of a file: replaces upstream's function."""
        path = Path(module_path)
        if self._models != (path.parent if path.is_file() else path):
            return self._scan(module_path, prefix)
        known, name = self._known, prefix or ""
        try:
            return dict(_PAIRS.decode(known.structures[name]))
        except (KeyError, ValueError):
            structure = self._scan(module_path, prefix)
            self._keep(name, structure)
            return structure

    @cached_property
    def _known(self) -> _Found:
        found = new = _Found(self._source())
        try:
            found = msgspec.json.decode(own_content(self._file, _MAX_INDEX_BYTES), type=_Found)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s is not used, and transformers is read: %s", self._file, error)
        return found if found.source == new.source else new

    def _keep(self, name: str, structure: _Structure) -> None:
        """Write the file, if it can be read as the same."""
        try:
            pairs = msgspec.json.encode(list(structure.items()))
            if dict(_PAIRS.decode(pairs)) == structure:
                self._known.structures[name] = msgspec.Raw(pairs)
                replace_file(self._file, msgspec.json.encode(self._known))
        except (OSError, TypeError, ValueError) as error:
            log.debug("%s is not written: %s", self._file, error)

    def _source(self) -> str:
        """Return a digest of the names, sizes and times of all files."""
        digest = hashlib.sha256(_facts(self._scanner))
        for folder, folders, names in os.walk(self._models):
            folders[:] = sorted(set(folders) - {"__pycache__"})
            for name in sorted(names):
                digest.update(_facts(Path(folder, name)))
        return digest.hexdigest()


_PAIRS = msgspec.json.Decoder(list[tuple[frozenset[str], dict[str, set[str]]]])


def _facts(path: Path) -> bytes:
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}\n".encode()


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
