import pytest

from backend.core.prompt import Prompt
from backend.core.request import GenerationRequest, SamplingParams
from backend.engine.row import Row
from backend.engine.scheduler import MAX_TIMES_PASSED_OVER, Scheduler


def make_row(name: str, prompt_tokens: int = 2) -> Row:
    request = GenerationRequest(
        request_id=name,
        prompt=Prompt(tuple(range(prompt_tokens))),
        sampling=SamplingParams(),
        max_tokens=4,
        stop_token_ids=frozenset(),
    )
    return Row(request)


def scheduler_with(*rows: Row, max_slots: int = 8, max_active: int = 8) -> Scheduler:
    scheduler = Scheduler(max_slots=max_slots, max_active=max_active)
    for row in rows:
        scheduler.enqueue(row)
    scheduler.check()
    return scheduler


def test_rows_are_admitted_first_come_first_served_up_to_the_slots():
    rows = [make_row(str(i)) for i in range(5)]
    scheduler = scheduler_with(*rows, max_slots=3)
    assert scheduler.admit() == rows[:3]
    assert scheduler.admit() == []
    scheduler.release(rows[1])
    assert scheduler.admit() == [rows[3]]
    scheduler.check()


def test_the_least_left_prefills_first():
    long, short = make_row("long", 1000), make_row("short", 10)
    scheduler = scheduler_with(long, short)
    scheduler.admit()
    assert scheduler.next_prefill() is short


def test_a_long_prompt_is_not_starved_by_short_ones():
    long = make_row("long", 1000)
    scheduler = scheduler_with(long, max_slots=100)
    scheduler.admit()
    chosen = []
    for i in range(MAX_TIMES_PASSED_OVER + 1):
        short = make_row(f"short-{i}", 3)
        scheduler.enqueue(short)
        scheduler.admit()
        row = scheduler.next_prefill()
        chosen.append(row)
        row.fed = len(row.token_ids) - 1
        scheduler.activate()
        scheduler.check()
    assert chosen[-1] is long


def test_prefilled_rows_join_only_while_there_is_room():
    rows = [make_row(str(i), 1) for i in range(3)]
    scheduler = scheduler_with(*rows, max_slots=3, max_active=2)
    scheduler.admit()
    assert scheduler.activate() == rows[:2]
    assert scheduler.activate() == []
    scheduler.release(rows[0])
    assert scheduler.activate() == [rows[2]]
    scheduler.check()


def test_a_model_that_cannot_batch_has_one_slot():
    rows = [make_row(str(i)) for i in range(3)]
    scheduler = scheduler_with(*rows, max_slots=8, max_active=1)
    assert scheduler.admit() == rows[:1]


def test_releasing_an_unknown_row_changes_nothing():  # lesson 14
    row = make_row("known")
    scheduler = scheduler_with(row)
    scheduler.release(make_row("unknown"))
    scheduler.release(row)
    scheduler.release(row)
    assert scheduler.is_idle
    scheduler.check()


def test_rows_that_lost_their_cache_prefill_again():
    rows = [make_row(str(i), 1) for i in range(2)]
    scheduler = scheduler_with(*rows)
    scheduler.admit()
    scheduler.activate()
    assert scheduler.deactivate() == rows
    assert scheduler.active == []
    assert scheduler.slots_taken == 2
    scheduler.check()


def test_check_sees_a_row_in_two_places():
    row = make_row("twice")
    scheduler = scheduler_with(row)
    scheduler.active.append(row)
    with pytest.raises(AssertionError, match="two places"):
        scheduler.check()
