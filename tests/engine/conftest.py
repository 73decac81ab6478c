"""Tiny networks for the engine's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def networks(tiny_models: Callable[[str], Path]) -> Callable[[str], Any]:
    """Load a tiny network of a family, once."""
    loaded: dict[str, Any] = {}

    def network(family: str) -> Any:
        if family not in loaded:
            from backend.model.upstream import import_mlx_lm

            loaded[family] = import_mlx_lm().load_model(tiny_models(family))[0]
        return loaded[family]

    return network
