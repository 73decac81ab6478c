"""A machine on which no further process can be started."""

import resource
from pathlib import Path

import pytest

from backend.engine.engine import Engine
from backend.errors import EngineFailedError


@pytest.fixture
def no_descriptors():
    """Leave no number for the connection to a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(list(Path("/proc/self/fd").iterdir()))

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_that_cannot_be_started_is_told_in_plain_words(no_descriptors):
    engine = Engine(serve=lambda loaded, _: loaded)
    no_descriptors()
    with pytest.raises(EngineFailedError, match="Too many open files"):
        await engine._supervisor._started()
