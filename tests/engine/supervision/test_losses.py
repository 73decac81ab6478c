"""The counts of a model whose engine process was lost."""

import pytest

from backend.core.engine_status import EngineStatus
from backend.core.metric_table import METRICS, MetricKind, zeros
from backend.engine.supervision.supervisor import Losses
from backend.errors import EngineFailedError

OWN = {"restarts", "lost_s"}


def keys(kind):
    rows = ((name, metric) for name, metric in METRICS.items() if metric.kind is kind)
    return [key for name, metric in rows for key in metric.keys(name) if name not in OWN]


def after_two_losses(key, last):
    losses = Losses()
    for value in (5, 7):
        losses.count(EngineStatus(metrics=zeros() | {key: value}))
    return losses.added_to(EngineStatus(metrics=zeros() | {key: last})).metrics[key]


@pytest.mark.parametrize("key", keys(MetricKind.COUNTER))
def test_a_count_goes_on_where_that_of_a_lost_process_ended(key):
    assert after_two_losses(key, 2) == 14


@pytest.mark.parametrize("key", keys(MetricKind.GAUGE))
def test_what_is_measured_is_that_of_the_present_process(key):
    assert after_two_losses(key, 2) == 2


def test_restarts_and_the_time_that_they_took_are_added_up():
    losses = Losses()
    for number in (1, 2):
        losses.note_restart(EngineFailedError("it is gone"), 1.5)
        status = losses.added_to(EngineStatus())
        assert (status.metrics["restarts"], status.metrics["lost_s"]) == (number, 1.5 * number)
        assert [restart.lost_s for restart in status.latest_restarts] == [1.5] * number
