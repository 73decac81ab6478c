"""An engine whose groups leave nothing behind, and a model that two processes can share."""

import pytest
from groups import build_divisible, workers
from waiting import until

from backend.engine.engine import Engine
from backend.pipeline.served_model import ServedModel


@pytest.fixture
async def engine():
    engine = Engine(serve=ServedModel.of)
    yield engine
    await engine.close(drain_timeout_s=0.0)
    await until(lambda: not workers())


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory):
    return build_divisible("llama", tmp_path_factory.mktemp("small_llama"), 1)
