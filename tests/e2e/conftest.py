"""Servers that the tests of a module share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from serving import SharedServers


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give tests that share a server the event loop that it was started in."""
    if "shared" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SharedServers]:
    """Serve a model as `served` does, for all tests of a module that ask for the same.

    For tests that load nothing, and that neither count nor measure the work of a server.
    """
    async with SharedServers() as servers:
        yield servers
