"""Fixtures for every suite: tiny random models, built once per session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TinyModels = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Build a tiny model of a family on first use and return its directory."""
    built: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in built:
            from scripts.tiny_models import build

            built[family] = build(family, tmp_path_factory.mktemp(family))
        return built[family]

    return directory


@pytest.fixture(scope="session")
def networks(tiny_models: TinyModels) -> Callable[[str], Any]:
    """Load a tiny network of a family, once."""
    loaded: dict[str, Any] = {}

    def network(family: str) -> Any:
        if family not in loaded:
            from backend.model.upstream import import_mlx_lm

            loaded[family] = import_mlx_lm().load_model(tiny_models(family))[0]
        return loaded[family]

    return network
