"""Fixtures for every suite: tiny random models, built once per session."""

from collections.abc import Callable
from pathlib import Path

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
