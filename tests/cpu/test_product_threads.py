"""As many threads for matrix products as make passes faster, on a Linux CPU."""

import os
import subprocess
import sys

import pytest

from backend.cpu.products import FIRST_REST, FIRST_THREADS, LONGEST_REST, TRIED_STEPS, ThreadChoice
from common.openblas import find_openblas, preloading
from common.process import usable_cores

SET_THREADS = """
from backend.cpu.products import choose_threads
from common import openblas

choose_threads({limit})
print(openblas.has_openblas() and openblas.threads())
"""


def told(limit, environment):
    script = SET_THREADS.format(limit=limit)
    command = [sys.executable, "-c", script]
    return subprocess.check_output(command, env=os.environ | environment, text=True).split()


def chosen(most, step_s, *, steps=4000, rows=1):
    """Return the numbers used for steps, one after another, whose time depends on the number."""
    choice, used = ThreadChoice(most), []
    for _ in range(steps):
        used.append(choice.count)
        choice.observe(rows, step_s(choice.count))
    return used


def scaling_to(cores, *, work_s=1.0):
    """A step that takes half as long with twice as many threads, up to a number of cores."""
    return lambda threads: work_s / min(threads, cores)


@pytest.mark.parametrize(
    ("cores", "most", "expected"), [(1, 16, 1), (4, 16, 4), (16, 16, 16), (16, 6, 6), (4, 1, 1)]
)
def test_as_many_threads_are_taken_as_make_steps_faster(cores, most, expected):
    used = chosen(most, scaling_to(cores))
    assert used[0] == min(most, FIRST_THREADS)
    assert sum(count == expected for count in used[-1000:]) > 950


def test_a_gain_of_some_percent_is_not_worth_another_core():
    assert chosen(8, lambda threads: 1.0 - 0.02 * (threads > 1))[-1] == 1


def test_between_both_bounds_nothing_changes():
    used = chosen(2, lambda threads: 1.0 - 0.1 * (threads > 1))
    assert sum(count == 2 for count in used) > 0.9 * len(used)


def test_trials_of_what_does_not_pay_become_seldom_and_stay_possible():
    used = chosen(2, scaling_to(2), steps=20_000)
    assert used.count(1) < 0.01 * len(used)
    assert 1 in used[-(LONGEST_REST + TRIED_STEPS) :]


@pytest.mark.parametrize(("slower", "steps"), [(2.0, 1), (1.7, 1), (1.36, 2), (1.2, 3)])
def test_a_slower_number_is_given_up_once_it_has_lost_half_a_step(slower, steps):
    used = chosen(2, lambda threads: slower if threads == 1 else 1.0, steps=FIRST_REST + 8)
    assert used.count(1) == steps


def test_the_choice_follows_a_machine_that_becomes_busy():
    choice = ThreadChoice(2)
    for cores in (2, 1, 2):
        for _ in range(3 * LONGEST_REST):
            choice.observe(1, scaling_to(cores)(choice.count))
        assert choice.count == cores


def test_single_delays_change_nothing():
    delays = iter(range(10**6))
    used = chosen(2, lambda threads: (9.0 if next(delays) % 5 == 0 else 1.0) / threads)
    assert sum(count == 2 for count in used) > 0.9 * len(used)


def test_steps_of_other_numbers_of_rows_are_not_compared():
    choice = ThreadChoice(2)
    for step in range(10_000):
        assert choice.count == 2
        choice.observe(1 + step % 2, 1.0)


@pytest.mark.mlx
def test_without_openblas_nothing_is_set():
    assert told(None, {"LD_PRELOAD": ""}) == ["False"]


@pytest.mark.mlx
@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
def test_with_openblas_the_number_is_set_unless_the_environment_sets_it():
    environment = preloading({}, find_openblas())
    assert told(1, environment) == ["1"]
    assert (
        told(None, environment)
        == told(10_000, environment)
        == [f"{min(usable_cores(), FIRST_THREADS)}"]
    )
    given = told(None, environment | {"OPENBLAS_NUM_THREADS": "3"})
    assert given == [f"{min(3, usable_cores())}"]
