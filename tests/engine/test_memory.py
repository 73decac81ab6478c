"""Rows that share a budget, from admission to the end, without a model."""

import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import make_row

from backend.core.request import Priority
from backend.engine.memory import Memory
from backend.engine.rows.admission import KvProfile, Reservations, Sharing
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler

PROFILE = KvProfile(bytes_per_token=1)
ANY_TOKEN = 7


@dataclass
class RoomKept:
    """In the place of a keeper: the room of the prompt cache, and the rows saved to it."""

    nbytes: int = 0
    saved: list[Row] = field(default_factory=list)
    used_tokens: int = 0

    def sharable(self, row: Row) -> Sharing:  # noqa: ARG002
        return Sharing()

    def use(self, row: Row, tokens: int) -> None:
        """Share nothing."""

    def leave_room(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def claim(self, row: Row) -> None:
        """Hold nothing."""

    def leave(self, row: Row) -> None:
        self.saved.append(row)


class Bench:
    """Turns of an engine: every active row draws a token per turn."""

    def __init__(self, budget_bytes: int, *, slots: int = 8) -> None:
        self.scheduler = Scheduler(max_slots=slots, max_active=slots)
        self.books = Reservations(PROFILE, budget_bytes, 1024)
        self.keeper = RoomKept()
        self.watch = Memory(self.books, self.scheduler, self.keeper)
        self.ended: list[Row] = []
        self.pauses = 0

    def enqueue(self, *rows: Row) -> None:
        for row in rows:
            self.watch.reservations.require_fit(row)
            self.scheduler.enqueue(row)

    def turn(self) -> None:
        self.watch.admit()
        for row in self.scheduler.prefilling:
            row.fed = len(row.token_ids) - 1
        self.scheduler.activate()
        self.watch.before_step()
        for row in list(self.scheduler.active):
            self._step(row)
        self.watch.check()
        self.scheduler.check()
        assert self.taken_bytes + self.keeper.nbytes <= self.books.budget_bytes

    def run(self, *rows: Row) -> None:
        self.enqueue(*rows)
        for _ in range(20_000):
            if self.scheduler.is_idle:
                return
            self.turn()
        raise AssertionError("it does not end")

    @property
    def taken_bytes(self) -> int:
        """The bytes of batch caches that are as long as the longest row."""
        running = [row for row in self.scheduler.active if not row.is_paused]
        return len(running) * PROFILE.row_bytes(max((row.fed for row in running), default=0))

    def _step(self, row: Row) -> None:
        if row.is_paused:
            self.pauses += 1
            self.watch.put_back(row)
            return
        row.fed += 1
        row.drawn += 1
        if row.take(ANY_TOKEN) is not None:
            self.scheduler.remove(row)
            self.watch.release(row)
            self.ended.append(row)


def open_ended(name: str, prompt_tokens: int, **options) -> Row:
    return make_row(name, prompt_tokens, **{"max_tokens": 3000, "is_open_ended": True} | options)


def test_the_prompt_cache_has_what_the_rows_leave():
    bench = Bench(10_000)
    row = make_row("row", 1000, max_tokens=20)
    bench.enqueue(row)
    bench.watch.admit()
    assert bench.keeper.nbytes == 10_000 - PROFILE.row_bytes(1020)
    bench.run()
    assert bench.keeper.nbytes == 10_000


def test_a_request_waits_for_memory_and_then_runs():
    bench = Bench(2 * PROFILE.row_bytes(500))
    rows = [make_row(str(i), 450, max_tokens=50) for i in range(5)]
    bench.enqueue(*rows)
    bench.turn()
    assert bench.scheduler.active == rows[:2]
    bench.run()
    assert bench.ended == rows
    assert bench.pauses == 0


def test_the_later_of_two_pauses_and_goes_on_when_the_other_has_ended(caplog):
    bench = Bench(2 * PROFILE.row_bytes(2000))
    rows = [open_ended(name, 100) for name in ("older", "newer")]
    with caplog.at_level(logging.WARNING):
        bench.run(*rows)
    assert bench.ended == rows
    assert bench.pauses == 1
    assert "request id=newer pauses at" in caplog.text
    assert all(row.generated == 3000 for row in rows)


def test_a_higher_priority_does_not_pause_for_a_lower():
    bench = Bench(2 * PROFILE.row_bytes(2000))
    low, high = open_ended("low", 100, priority=Priority.LOW), open_ended("high", 100)
    bench.run(low, high)
    assert bench.ended == [high, low]


def test_a_prompt_that_pauses_is_saved_and_waits():
    bench = Bench(2 * PROFILE.row_bytes(1500), slots=2)
    older, newer = open_ended("older", 100), open_ended("newer", 100)
    bench.enqueue(older, newer)
    bench.watch.admit()
    older.fed = len(older.token_ids) - 1
    bench.scheduler.activate()
    older.fed = 2000
    bench.watch.before_step()
    assert bench.keeper.saved == [newer]
    assert list(bench.scheduler.waiting) == [newer]
    bench.watch.check()


def test_a_row_that_fills_all_memory_ends_with_a_warning(caplog):
    bench = Bench(PROFILE.row_bytes(2000))
    row = open_ended("row", 100)
    with caplog.at_level(logging.WARNING):
        bench.run(row)
    # Nothing was in flight: it takes one more token to end.
    assert row.fed == bench.books.most_tokens + 1
    assert f"request id=row ends at {row.generated} generated tokens" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_row_that_ends_early_keeps_the_token_in_flight(in_flight):
    row = open_ended("row", 10)
    row.token_ids += [ANY_TOKEN] * 5
    row.drawn = 5 + in_flight
    row.curtail()
    row.curtail()
    assert row.max_tokens == 6


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 900), st.integers(1, 900), st.booleans(), st.sampled_from(list(Priority))
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.integers(1, 5), st.integers(1800, 6000))
def test_whatever_comes_everything_ends_within_the_memory(requests, slots, budget_bytes):
    bench = Bench(budget_bytes, slots=slots)
    most = bench.books.most_tokens
    rows = [
        make_row(str(i), prompt, max_tokens=min(limit, most - prompt), is_open_ended=is_open)
        for i, (prompt, limit, is_open, priority) in enumerate(requests)
        if prompt < most
    ]
    bench.run(*rows)
    assert set(bench.ended) == set(rows)
