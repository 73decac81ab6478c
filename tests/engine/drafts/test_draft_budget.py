"""Drafts lose no more than was granted, however wrong they and the measured costs are."""

import random

import pytest
from virtual_decoding import VirtualDecoding, row_of

from backend.engine.drafts.pricing import Budget, Source

ALONE = {"speculation": "draft"}
# The costs at load, in passes of one token: as they are, as if any width were free, and as on a
# machine that was busy at first.
MEASURED = [{1: 1.0, 64: 20.0}, {1: 1.0, 64: 1.0}, {1: 2.0, 8: 0.5, 32: 1.0}]


def steep_s(rows, width):
    return 1.0 + 0.3 * (rows * width - 1)


def gentle_s(rows, width):
    return 1.0 + 0.02 * (rows * width - 1)


def delayed(seconds, burst=1):
    """Return times that vary, with delays that last for some passes."""
    rng = random.Random(3)
    held_up = 0

    def drawn(rows, width):
        nonlocal held_up
        held_up = burst if rng.random() < 0.02 else max(held_up - 1, 0)
        factor = 6.0 if held_up else 1.0
        return factor * seconds(rows, width) * rng.lognormvariate(0.0, 0.1)

    return drawn


def small_s(rows, width):
    return 0.1 * (1.0 + 0.05 * rows * width)


WRONG = {
    # A text of five different tokens: most matches are wrong.
    "lookup": {"symbols": 5},
    "small model": {"draft_s": small_s, "options": ALONE},
    "model as large": {"draft_s": steep_s, "options": ALONE},
    "model thought free": {
        "draft_s": steep_s,
        "draft_measured": {1: 0.01, 64: 0.01},
        "options": ALONE,
    },
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("measured", MEASURED)
@pytest.mark.parametrize(("true_s", "rows"), [(steep_s, 1), (steep_s, 8), (gentle_s, 4)])
@pytest.mark.one_in(3)
def test_drafts_that_are_wrong_cost_hardly_anything(wrong, measured, true_s, rows):
    decoding = VirtualDecoding(measured, true_s, **WRONG[wrong])
    for _ in range(6):
        decoding.run(rows, 128, prompt=40)
    decoding.now = decoding.plain_s = 0.0
    for _ in range(12):
        decoding.run(rows, 128, prompt=40)
    assert decoding.gain > 0.97


@pytest.mark.parametrize("rows", [1, 16])
def test_delays_by_other_work_make_no_wrong_draft_look_right(rows):
    def decoded(**options):
        decoding = VirtualDecoding(MEASURED[0], delayed(gentle_s), symbols=5, options=options)
        for _ in range(20):
            decoding.run(rows, 128)
        return decoding.now

    assert decoded() < 1.05 * decoded(speculation="off")


def test_delays_by_other_work_stop_no_drafts_that_are_right():
    def decoded(**options):
        slow_s = delayed(gentle_s, burst=5)
        decoding = VirtualDecoding(
            MEASURED[0], slow_s, delayed(small_s, burst=5), rightness=1.0, options=options
        )
        for _ in range(20):
            decoding.run(1, 128, prompt=40)
        return decoding.now

    assert decoded(speculation="draft") < decoded(speculation="off") / 3


@pytest.mark.parametrize("measured", MEASURED)
@pytest.mark.parametrize(("rows", "gain"), [(1, 3.5), (4, 2.2), (8, 1.4)])
def test_drafts_that_are_right_gain_whatever_was_measured_at_load(measured, rows, gain):
    decoding = VirtualDecoding(measured, gentle_s, small_s, rightness=1.0, options=ALONE)
    for _ in range(8):
        decoding.run(rows, 128, prompt=40)
    assert decoding.gain > gain


def test_a_model_whose_passes_were_delayed_at_load_is_measured_again():
    dear = {1: 5.0, 64: 20.0}
    decoding = VirtualDecoding(
        MEASURED[0], gentle_s, small_s, draft_measured=dear, rightness=1.0, options=ALONE
    )
    for _ in range(8):
        decoding.run(1, 128, prompt=10)
    assert decoding.gain > 2.0


def test_a_source_that_becomes_right_is_used_again():
    decoding = VirtualDecoding(MEASURED[0], gentle_s, small_s, rightness=0.0, options=ALONE)
    for _ in range(10):
        decoding.run(1, 128)
    decoding.rightness, decoding.now, decoding.plain_s = 1.0, 0.0, 0.0
    for _ in range(10):
        decoding.run(1, 128)
    assert decoding.gain > 2.0


def test_prompts_are_not_read_for_long_if_replies_end_before_that_pays():
    decoding = VirtualDecoding(MEASURED[0], gentle_s, small_s, rightness=1.0, options=ALONE)
    for _ in range(100):
        decoding.run(1, 8, prompt=400, limit=1000)
    assert decoding.gain > 0.85


def charged(budget, seconds, **counts):
    for name, (drafted, accepted) in counts.items():
        budget.count(Source[name], drafted, accepted)
    budget.settle(seconds, 1, 1.0, 2, Source.FORCED)


def test_each_source_pays_for_its_share_of_a_step_and_keeps_what_it_saves():
    budget = Budget(Source)
    granted = budget.left(Source.MATCH)
    budget.expect(0.8, 0.4)
    charged(budget, 2.0, MATCH=(3, 0), MODEL=(1, 2))
    assert budget.left(Source.MATCH) == pytest.approx(granted - 0.45)
    assert budget.left(Source.MODEL) == pytest.approx(granted - 0.4 - 0.15 + 1.0)
    assert budget.left(Source.FORCED) == granted


def test_who_asked_pays_for_a_step_without_drafts():
    budget = Budget(Source)
    granted = budget.left(Source.FORCED)
    charged(budget, 1.5)
    assert budget.left(Source.FORCED) == granted - 0.5
    assert budget.left(Source.MATCH) == granted


def test_a_source_that_has_lost_all_rests_until_time_has_gone_by():
    budget = Budget([Source.FORCED, Source.MATCH])
    while Source.FORCED in budget.leave(1.0, 1.0).drafts:
        charged(budget, 2.0)
    assert budget.leave(1.0, 1.0).drafts == [Source.MATCH]
    passes = 0
    while Source.FORCED not in budget.leave(1.0, 1.0).trials:
        budget.earn(1.0)
        passes += 1
    assert 100 < passes < 400


def test_no_source_pays_for_delays():
    budget = Budget([Source.FORCED])
    granted = budget.left(Source.FORCED)
    charged(budget, 50.0)
    charged(budget, 50.0)
    assert budget.left(Source.FORCED) == granted - 2.0


def test_a_row_owes_the_time_of_reading_until_it_leaves():
    budget, row = Budget([Source.MODEL]), row_of([1, 2])
    granted = budget.left(Source.MODEL)
    budget.lend(row, 6.0, 2.0)
    budget.settle(8.0, 1, 2.0, 1, Source.MODEL)
    budget.follow([row])
    assert budget.left(Source.MODEL) == granted
    budget.follow([])
    assert budget.left(Source.MODEL) == granted - 3.0
    budget.follow([])
    assert budget.left(Source.MODEL) == granted - 3.0
