"""The counts of a model whose engine process was lost."""

import pytest

from backend.core.status import EngineStatus
from backend.engine.supervision.losses import Losses


@pytest.mark.parametrize(
    "count",
    ["prompt_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens", "media_encoded"],
)
def test_a_count_goes_on_where_that_of_a_lost_process_ended(count):
    losses = Losses()
    losses.count(EngineStatus(**{count: 5}))
    losses.count(EngineStatus(**{count: 7}))
    assert getattr(losses.added_to(EngineStatus(**{count: 2})), count) == 14
