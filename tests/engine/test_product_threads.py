"""As many threads for matrix products as make passes faster, on a Linux CPU."""

import os
import subprocess
import sys

import pytest

from backend.engine.trials.product_threads import fewest_threads, most_threads
from common.openblas import find_openblas, preloading
from common.process.cores import usable_cores

SET_THREADS = """
import mlx.core as mx
from backend.engine.trials.product_threads import adjust_product_threads
from common import openblas

def run_pass():
    mx.eval(mx.ones((8, 64)) @ mx.ones((64, 64)))
    passes.append("pass")

passes = []
adjust_product_threads(run_pass, {limit})
print(openblas.has_openblas() and openblas.threads(), len(passes))
"""


def told(limit, environment):
    script = SET_THREADS.format(limit=limit)
    command = [sys.executable, "-c", script]
    return subprocess.check_output(command, env=os.environ | environment, text=True).split()


def scaling_to(cores, *, work_s=1.0):
    """A pass that takes half as long with twice as many threads, up to a number of cores."""
    return lambda threads: work_s / min(threads, cores)


@pytest.mark.parametrize(
    ("cores", "most", "expected"), [(1, 16, 1), (4, 16, 4), (16, 16, 16), (16, 6, 6), (4, 1, 1)]
)
def test_threads_are_doubled_while_passes_become_faster(cores, most, expected):
    assert fewest_threads(scaling_to(cores), most) == expected


def test_a_gain_of_some_percent_is_not_worth_another_core():
    assert fewest_threads(lambda threads: 1.0 - 0.1 * (threads > 1), 8) == 1


def test_the_fastest_of_some_short_passes_counts():
    delays = iter([5.0, *[0.0] * 100])
    assert fewest_threads(lambda threads: 0.01 / threads + next(delays), 2) == 2


def test_a_long_pass_is_repeated_once():
    counts = []

    def slow(threads):
        counts.append(threads)
        return 10.0 / threads

    assert fewest_threads(slow, 4) == 4
    assert counts == [1, 1, 2, 2, 4, 4]


def test_a_limit_of_the_host_holds_below_the_number_of_cores():
    assert most_threads(None) == most_threads(10_000) == usable_cores()
    assert most_threads(1) == 1


@pytest.mark.mlx
def test_without_openblas_nothing_is_tried():
    assert told(None, {"LD_PRELOAD": ""}) == ["False", "0"]


@pytest.mark.mlx
@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
def test_with_openblas_the_number_is_set_unless_the_environment_sets_it():
    environment = preloading({}, find_openblas())
    assert told(1, environment) == ["1", "0"]
    chosen = told(None, environment | {"OPENBLAS_NUM_THREADS": "3"})
    assert chosen == [f"{min(3, usable_cores())}", "0"]
