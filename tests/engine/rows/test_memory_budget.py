"""How much memory is for KV caches."""

import logging

import pytest

from backend.config import ModelOptions, TuningOptions
from backend.engine.rows.admission import kv_budget_bytes, pass_bytes, working_set_bytes

pytestmark = pytest.mark.mlx

GIB = 2**30


def options(share=0.9, **tuning):
    return ModelOptions(model="m", memory_utilization=share, tuning=TuningOptions.of(**tuning))


def test_the_budget_is_what_the_weights_leave_less_a_reserve():
    assert kv_budget_bytes(options(), 4 * GIB, 10 * GIB) == pytest.approx(0.9 * 5 * GIB)
    assert kv_budget_bytes(options(0.5), 4 * GIB, 10 * GIB) == pytest.approx(0.9 * GIB)


def test_remembered_media_are_beside_the_kv_caches():
    beside = kv_budget_bytes(options(), 4 * GIB, 10 * GIB, media_bytes=GIB)
    assert beside == pytest.approx(0.9 * 4 * GIB)


def test_the_option_decides_alone():
    assert kv_budget_bytes(options(max_kv_bytes=7), 4 * GIB, 10 * GIB) == 7


def test_the_reserve_is_for_passes():
    budget = kv_budget_bytes(options(), 4 * GIB, 10 * GIB)
    assert pass_bytes(options(), 4 * GIB, 10 * GIB, budget) == pytest.approx(0.1 * 5 * GIB)
    assert pass_bytes(options(), 4 * GIB, 10 * GIB, GIB) == pytest.approx(4 * GIB)
    assert pass_bytes(options(), 9 * GIB, 10 * GIB, budget) == int(0.02 * 9 * GIB)


def test_weights_that_leave_nothing_leave_a_little_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert kv_budget_bytes(options(), 9 * GIB, 10 * GIB) == int(0.02 * 9 * GIB)
    assert "the weights take 9.0 of 9.0 GiB: 0.18 GiB" in caplog.text


def test_the_working_set_is_a_part_of_the_machine():
    assert working_set_bytes() > 2**28
