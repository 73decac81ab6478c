"""Published models: `make real-models` converts them, `make test-real` runs these tests."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from real_answers import MODELS
from serving import SharedServers

REFERENCES = Path(__file__).with_name("references")


def pytest_itemcollected(item: pytest.Item) -> None:
    if "shared" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SharedServers]:
    async with SharedServers() as servers:
        yield servers


@pytest.fixture(scope="session")
def real_models() -> Callable[[str], Path]:
    """Return a function from a checkpoint's name to its directory; a missing one skips the test."""

    def directory(name: str) -> Path:
        path = MODELS / name
        if not path.is_dir():
            pytest.skip(f"build/real-models has no {name}: run `make real-models`")
        return path

    return directory


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Any]:
    """Return a function from a model's name to the results of `scripts.real_models.references`."""
    return lambda name: json.loads((REFERENCES / f"{name}.json").read_text(encoding="utf-8"))
