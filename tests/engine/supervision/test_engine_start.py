"""A machine on which no further process can be started."""

import os
import resource

import pytest

from backend.config import ModelOptions
from backend.engine.engine import Engine
from backend.engine.supervision.supervisor import Supervisor
from backend.errors import LoadFailedError


@pytest.fixture
def no_descriptors():
    """Leave no number for the connection to a process, also none that a closed file left free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit():
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("has_spare", [False, True])
async def test_a_load_says_in_plain_words_that_no_process_can_be_started(
    no_descriptors, tmp_path, has_spare
):
    supervisor = Supervisor(lambda _: None, 1.0, None)
    no_descriptors()
    if has_spare:
        supervisor.starter.prepare()
    with pytest.raises(LoadFailedError, match=r"cannot be started: .*Too many open files"):
        await supervisor.look(ModelOptions(model="any"), tmp_path)


async def test_closing_is_not_disturbed_by_a_process_that_never_started(no_descriptors):
    engine = Engine(serve=lambda loaded, _: loaded)
    no_descriptors()
    engine.prepare()
    await engine.close(drain_timeout_s=0.0)
