"""The memory that requests are charged, and which of them run, in numbers alone."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import make_row

from backend.config import ModelOptions, TuningOptions
from backend.engine.rows.admission import (
    ALLOCATION_STEP_TOKENS,
    KvProfile,
    Reservations,
    Sharing,
    WindowProfile,
)
from backend.errors import OutOfMemoryError, OverloadedError

STEP = ALLOCATION_STEP_TOKENS
EXPECTED = 40
EXTENSION = 10
TEN_PER_TOKEN = KvProfile(bytes_per_token=10)


def books_for(tokens, rows=1):
    """Books with room for so many rows of so many tokens, at ten bytes each."""
    return Reservations(TEN_PER_TOKEN, rows * TEN_PER_TOKEN.row_bytes(tokens), EXPECTED)


def test_a_row_takes_its_tokens_one_allocation_more_and_what_is_fixed():
    profile = KvProfile(bytes_per_token=10, fixed_bytes=7)
    assert profile.row_bytes(100) == 10 * (100 + STEP) + 7


def test_a_window_costs_no_more_than_its_size():
    profile = KvProfile(windows=(WindowProfile(10, 512), WindowProfile(1, 2**20)))
    assert profile.row_bytes(100) == 10 * (100 + STEP) + (100 + STEP)
    assert profile.row_bytes(5000) == 10 * 512 + (5000 + STEP)


@given(st.integers(0, 50), st.integers(0, 9), st.integers(0, 10**5))
def test_the_most_tokens_fit_and_one_more_does_not(per_token, window, budget):
    profile = KvProfile(per_token, 100, (WindowProfile(window, 300),))
    most = profile.max_tokens(budget)
    assert most < 0 or profile.row_bytes(most) <= budget
    if most < 2**40 - 1:
        assert profile.row_bytes(most + 1) > budget


def test_what_could_never_fit_is_refused_with_the_numbers():
    books = books_for(100)
    books.require_fit(make_row("fits", 60, max_tokens=40))
    with pytest.raises(OverloadedError, match="60 prompt tokens and 41 generated") as caught:
        books.require_fit(make_row("does not", 60, max_tokens=41))
    assert "room for 100 tokens" in str(caught.value)


def test_a_refusal_tells_what_is_needed_and_what_there_is():
    profile = KvProfile(bytes_per_token=2**20)
    books = Reservations(profile, profile.row_bytes(100), EXPECTED)
    with pytest.raises(OverloadedError) as caught:
        books.require_fit(make_row("does not", 60, max_tokens=45))
    assert f"takes {105 + STEP}.0 MiB, and there are {100 + STEP}.0 MiB" in str(caught.value)


def test_a_small_pass_that_takes_more_than_is_kept_free_is_reserved_while_the_prompt_lasts():
    books = Reservations(TEN_PER_TOKEN, 10**6, EXPECTED, pass_bytes=1000)
    books.passes.record(16, 100, 5000)
    rows = [make_row(name, 200, max_tokens=50) for name in "ab"]
    assert all(map(books.reserve, rows))
    caches = 2 * TEN_PER_TOKEN.row_bytes(250)
    # One pass runs at a time.
    assert books.reserved_bytes == caches + books.passes.least(200) - 1000 > caches
    for row in rows:
        row.fed = 199
    assert books.reserved_bytes == caches


def test_a_prompt_is_refused_if_its_cache_leaves_no_room_for_a_pass():
    books = Reservations(TEN_PER_TOKEN, TEN_PER_TOKEN.row_bytes(300), EXPECTED, pass_bytes=1000)
    fitting, row = make_row("fits", 100, max_tokens=50), make_row("does not", 200, max_tokens=100)
    books.require_fit(row)
    books.passes.record(16, 100, 5000)
    books.passes.record(16, 200, 5000)
    books.require_fit(make_row("before it", 90, max_tokens=50))
    with pytest.raises(OverloadedError, match="the last 16 of 200 prompt tokens"):
        books.require_fit(row)
    # Its cache leaves more.
    books.passes.record(16, 100, 2000)
    books.require_fit(fitting)


@pytest.mark.parametrize(("limit", "field"), [(None, "GPUMemoryUtilization"), (7, "max_kv_bytes")])
def test_books_without_room_for_a_request_name_what_limits_them(limit, field):
    options = ModelOptions(model="m", tuning=TuningOptions.of(max_kv_bytes=limit))
    books_for(2).require_room(options)
    with pytest.raises(OutOfMemoryError) as caught:
        books_for(1).require_room(options)
    assert str(caught.value) == (
        f"{field}: is too small: 2,570 bytes are for KV caches, "
        "and that of the shortest request takes 2,580"
    )


def test_without_a_limit_only_the_prompt_must_fit():
    books = books_for(100)
    books.require_fit(make_row("fits", 99, max_tokens=10**6, is_open_ended=True))
    with pytest.raises(OverloadedError):
        books.require_fit(make_row("does not", 100, max_tokens=10**6, is_open_ended=True))


def test_a_stated_limit_is_counted_whole_and_an_open_end_with_what_is_likely():
    stated, open_ended = books_for(10_000), books_for(10_000)
    stated.reserve(make_row("a", 50, max_tokens=5000))
    open_ended.reserve(make_row("b", 50, max_tokens=5000, is_open_ended=True))
    assert stated.reserved_bytes == TEN_PER_TOKEN.row_bytes(5050)
    assert open_ended.reserved_bytes == TEN_PER_TOKEN.row_bytes(50 + EXPECTED)


OWN_LENGTHS = replace(TEN_PER_TOKEN, has_own_lengths=True)


def test_rows_of_their_own_length_are_charged_it_and_no_more_than_padded_ones():
    alone = OWN_LENGTHS.batch_bytes([6000])
    assert alone == TEN_PER_TOKEN.row_bytes(6000)
    together = OWN_LENGTHS.batch_bytes([100] * 7 + [6000])
    assert alone < together < 1.5 * alone
    assert OWN_LENGTHS.batch_bytes([6000] * 8) == TEN_PER_TOKEN.batch_bytes([6000] * 8)


def test_windows_and_states_are_charged_every_row_alike():
    layers = KvProfile(0, 7, (WindowProfile(3, 64),))
    tokens = [10, 5000]
    assert replace(layers, has_own_lengths=True).batch_bytes(tokens) == layers.batch_bytes(tokens)


def test_padded_rows_are_charged_the_longest_of_them():
    books = Reservations(TEN_PER_TOKEN, 10**9, EXPECTED)
    long, short = make_row("long", 900, max_tokens=100), make_row("short", 9, max_tokens=1)
    books.reserve(long)
    books.reserve(short)
    assert books.reserved_bytes == 2 * TEN_PER_TOKEN.row_bytes(1000)
    books.release(long)
    assert books.reserved_bytes == TEN_PER_TOKEN.row_bytes(10)


def test_a_row_that_does_not_fit_beside_others_fits_when_they_are_done():
    books = books_for(100, rows=1)
    first, second = (make_row(name, 50, max_tokens=50) for name in "ab")
    assert books.reserve(first)
    assert not books.reserve(second)
    books.release(first)
    assert books.reserve(second)
    books.check([second])


def test_a_row_that_is_alone_takes_what_there_is():
    books = books_for(100)
    row = make_row("alone", 50, max_tokens=5000, is_open_ended=True)
    assert books.reserve(row)
    row.fed = 99
    assert books.extend(row)
    row.fed = 100
    assert not books.extend(row)
    books.check([row])


def test_an_open_end_is_extended_while_there_is_room():
    books = books_for(100 + EXPECTED + EXTENSION, rows=2)
    rows = [make_row(name, 100, max_tokens=5000, is_open_ended=True) for name in "ab"]
    assert all(map(books.reserve, rows))
    for row in rows:
        row.fed = 100 + EXPECTED
    assert all(map(books.extend, rows))
    rows[0].fed += EXTENSION
    assert not books.extend(rows[0])
    books.release(rows[1])
    assert books.extend(rows[0])


def test_what_rows_share_is_charged_once():
    room = OWN_LENGTHS.row_bytes(1100) + 3 * OWN_LENGTHS.row_bytes(120)
    rows = [make_row(name, 1000, max_tokens=100) for name in "abc"]
    apart = Reservations(OWN_LENGTHS, room, EXPECTED)
    assert [apart.reserve(row) for row in rows] == [True, False, False]
    together = Reservations(OWN_LENGTHS, room, EXPECTED)
    for row in rows:
        assert together.reserve(row, Sharing(990, 990))
        row.shared = 990
    assert together.shared_bytes == 990 * 10
    assert together.reserved_bytes <= 3 * OWN_LENGTHS.row_bytes(120)
    assert not together.is_exceeded
    rows[1].shared = rows[2].shared = 0
    assert together.is_exceeded
    together.release(rows[1])
    together.release(rows[2])
    assert not together.is_exceeded


def test_a_prefix_that_another_row_does_not_share_is_charged_beside_it():
    room = OWN_LENGTHS.row_bytes(1100) + 3 * OWN_LENGTHS.row_bytes(120)
    books = Reservations(OWN_LENGTHS, room, EXPECTED)
    first, second = (make_row(name, 1000, max_tokens=100) for name in "ab")
    assert books.reserve(first, Sharing(990, 990))
    first.shared = 990
    assert not books.reserve(second, Sharing(990, 1980))
    assert books.reserve(second, Sharing(990, 990))


def test_check_sees_a_row_without_a_reservation():
    with pytest.raises(AssertionError, match="without a reservation"):
        books_for(100).check([make_row("row")])


def test_extension_never_takes_what_another_has_reserved():
    books = books_for(100, rows=2)
    rows = [make_row(name, 60, max_tokens=40) for name in "ab"]
    assert all(map(books.reserve, rows))
    for row, fed in itertools.product(rows, range(60, 100)):
        row.fed = fed
        assert books.extend(row)
        books.check(rows)
