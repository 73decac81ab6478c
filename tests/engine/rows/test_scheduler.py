from collections import Counter, deque
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import make_row

from backend.core.request import Priority
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import MAX_TIMES_OVERTAKEN, MAX_TIMES_PASSED_OVER, Scheduler


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
    scheduler.remove(rows[1])
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


def test_beside_a_stream_of_short_prompts_a_long_one_has_every_ninth_chunk():
    long = make_row("long", 1000)
    scheduler = scheduler_with(long, max_slots=100)
    places = []
    for i in range(30):
        scheduler.enqueue(make_row(f"short-{i}", 3))
        scheduler.admit()
        row = scheduler.next_prefill()
        if row is long:
            places.append(i)
        prefill(row, 10)
        for done in scheduler.activate():
            scheduler.remove(done)
    assert places == [8, 17, 26]


def test_prefilled_rows_join_only_while_there_is_room():
    rows = [make_row(str(i), 1) for i in range(3)]
    scheduler = scheduler_with(*rows, max_slots=3, max_active=2)
    scheduler.admit()
    assert scheduler.activate() == rows[:2]
    assert scheduler.activate() == []
    scheduler.remove(rows[0])
    assert scheduler.activate() == [rows[2]]
    scheduler.check()


def test_a_model_that_cannot_batch_has_one_slot():
    rows = [make_row(str(i)) for i in range(3)]
    scheduler = scheduler_with(*rows, max_slots=8, max_active=1)
    assert scheduler.admit() == rows[:1]


def test_releasing_an_unknown_row_changes_nothing():
    row = make_row("known")
    scheduler = scheduler_with(row)
    scheduler.remove(make_row("unknown"))
    scheduler.remove(row)
    scheduler.remove(row)
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


def prefill(row, tokens):
    row.fed += min(tokens, row.prefill_left)


def run_to_the_end(scheduler, row):
    row.fed = len(row.token_ids) - 1
    scheduler.activate()
    scheduler.remove(row)
    scheduler.check()


def order_of_admission(scheduler):
    """Admit and end one row after another, and return their names."""
    names = []
    while rows := scheduler.admit():
        names += [row.request_id for row in rows]
        for row in rows:
            run_to_the_end(scheduler, row)
    return names


def test_priorities_are_admitted_in_order_and_each_first_come_first_served():
    names = ["low-1", "normal-1", "high-1", "low-2", "normal-2", "high-2"]
    rows = [make_row(name, priority=Priority[name.split("-")[0].upper()]) for name in names]
    order = order_of_admission(scheduler_with(*rows, max_slots=1))
    assert order == ["high-1", "high-2", "normal-1", "normal-2", "low-1", "low-2"]


def test_a_crowd_of_higher_priority_lets_one_of_the_lower_through_now_and_then():
    crowd = [make_row(f"high-{i}", priority=Priority.HIGH) for i in range(40)]
    late = [make_row(f"low-{i}", priority=Priority.LOW) for i in range(3)]
    order = order_of_admission(scheduler_with(*late, *crowd, max_slots=1))
    places = [order.index(row.request_id) for row in late]
    assert places == [8, 17, 26]


def test_what_does_not_fit_is_overtaken_by_what_does_but_not_for_ever():
    large, small = make_row("large"), [make_row(f"small-{i}") for i in range(20)]
    scheduler = scheduler_with(large, *small, max_slots=1)
    overtaking = []
    while rows := scheduler.admit(lambda row: row is not large):
        overtaking += rows
        run_to_the_end(scheduler, *rows)
    assert overtaking == small[:MAX_TIMES_OVERTAKEN]
    assert scheduler.admit() == [large]


@pytest.mark.parametrize(("before", "admitted"), [(15, ["small"]), (16, [])])
def test_what_fits_is_looked_for_among_the_first_sixteen_of_a_line(before, admitted):
    large, small = [make_row(f"large-{i}") for i in range(before)], make_row("small")
    scheduler = scheduler_with(*large, small)
    assert [row.request_id for row in scheduler.admit(lambda row: row is small)] == admitted


def test_a_prompt_that_is_done_is_fed_no_more_while_its_row_waits_for_the_batch():
    done, long, short = make_row("done", 1), make_row("long", 100), make_row("short", 5)
    scheduler = scheduler_with(done, long, short)
    scheduler.admit()
    assert scheduler.next_prefill() is short
    assert scheduler.companions(make_row("other", 9)) == [short, long]
    for row in (long, short):
        prefill(row, 100)
    assert scheduler.next_prefill() is None
    assert scheduler.companions(make_row("other", 9)) == []


def test_a_row_that_was_put_back_goes_before_those_that_never_ran():
    rows = [make_row(str(i)) for i in range(4)]
    scheduler = scheduler_with(*rows, max_slots=2)
    scheduler.admit()
    for row in (rows[1], rows[0]):
        scheduler.put_back(row)
        scheduler.check()
    assert order_of_admission(scheduler) == ["0", "1", "2", "3"]


def test_the_latest_row_of_the_least_priority_gives_way():
    ranks = {"high": Priority.HIGH, "low-1": Priority.LOW, "low-2": Priority.LOW}
    rows = {name: make_row(name, priority=rank) for name, rank in ranks.items()}
    rows["normal"] = make_row("normal")
    scheduler = scheduler_with(*rows.values())
    assert scheduler.yielding() is None
    scheduler.admit()
    yielding = []
    while row := scheduler.yielding():
        yielding.append(row.request_id)
        scheduler.put_back(row)
    assert yielding == ["low-2", "low-1", "normal", "high"]


def test_a_prompt_of_higher_priority_prefills_first():
    long = make_row("long", 1000, priority=Priority.HIGH)
    scheduler = scheduler_with(make_row("short", 10), long)
    scheduler.admit()
    assert scheduler.next_prefill() is long


def test_a_short_prompt_starts_within_two_chunks_beside_any_number_of_long_ones():
    longs = [make_row(f"long-{i}", 32_768) for i in range(15)]
    scheduler = scheduler_with(*longs, max_slots=16)
    scheduler.admit()
    for _ in range(100):
        prefill(scheduler.next_prefill(), 64)
    short = make_row("short", 40)
    scheduler.enqueue(short)
    scheduler.admit()
    assert short in [scheduler.next_prefill() for _ in range(2)]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.sampled_from(Priority))
def test_no_prompt_waits_longer_than_its_turn(lengths, priority):
    """However many come along that are shorter, or of higher priority."""
    rows = [make_row(str(i), 10_000 + n, priority=priority) for i, n in enumerate(lengths)]
    scheduler = scheduler_with(*rows, max_slots=100)
    scheduler.admit()
    fed = Counter[Row]()
    for number in range((MAX_TIMES_PASSED_OVER + 1) * (len(rows) + 1)):
        scheduler.enqueue(make_row(f"short-{number}", 5, priority=Priority.HIGH))
        scheduler.admit()
        row = scheduler.next_prefill()
        fed[row] += 1
        if row not in rows:
            run_to_the_end(scheduler, row)
    assert all(fed[row] >= 1 for row in rows)


def test_sixteen_equal_clients_get_equal_shares():
    """Each sends its next request when the one before has ended; shares are counted in steps."""
    numbers = count()
    scheduler = Scheduler(max_slots=5, max_active=5)
    steps = Counter[int]()
    clients: dict[Row, int] = {}

    def send(client):
        row = make_row(str(next(numbers)), 100)
        clients[row] = client
        scheduler.enqueue(row)

    for client in range(16):
        send(client)
    for _ in range(16 * 50):
        scheduler.admit()
        scheduler.activate()
        if row := scheduler.next_prefill():
            prefill(row, 32)
        for row in list(scheduler.active):
            steps[clients[row]] += 1
            row.drawn += 1
            if row.drawn == row.max_tokens:
                scheduler.remove(row)
                send(clients.pop(row))
        scheduler.check()
    assert max(steps.values()) - min(steps.values()) <= 2 * 4


ARRIVALS = st.lists(st.sampled_from([*Priority, None]), max_size=200)


@given(ARRIVALS, st.integers(1, 4))
def test_nobody_is_overtaken_without_end(arrivals, slots):
    """Whatever comes, a row waits for those before it and a bounded number of others."""
    scheduler = Scheduler(max_slots=slots, max_active=slots)
    ahead: dict[Row, int] = {}
    overtaken = Counter[Row]()
    running: deque[Row] = deque()
    for number, priority in enumerate(arrivals):
        if priority is not None:
            row = make_row(str(number), 1, priority=priority)
            same = [other for other in scheduler.waiting if other.params.priority is priority]
            ahead[row] = len(same)
            scheduler.enqueue(row)
        elif running:
            run_to_the_end(scheduler, running.popleft())
        for row in scheduler.admit():
            running.append(row)
            overtaken.update(scheduler.waiting)
        scheduler.check()
    # Of three priorities, two others may have to be let through in between.
    bound = MAX_TIMES_OVERTAKEN + len(Priority)
    assert all(times <= (ahead[row] + 1) * bound for row, times in overtaken.items())
