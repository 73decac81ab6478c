"""Fixtures for every suite: tiny random models, built once per session."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time, however slow the machine is.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
# `pytest tests/fuzz --hypothesis-profile=long` takes minutes, and looks further.
settings.register_profile("long", derandomize=False, max_examples=3000)

TinyModels = Callable[[str], Path]


def _built_once(script: str, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    built: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in built:
            build = importlib.import_module(script).build
            built[family] = build(family, tmp_path_factory.mktemp(family))
        return built[family]

    return directory


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Build a tiny model of a family on first use and return its directory."""
    return _built_once("scripts.tiny_models", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_vision_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Build a tiny model that sees on first use and return its directory."""
    return _built_once("scripts.tiny_vision", tmp_path_factory)


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
