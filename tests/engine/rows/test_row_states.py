"""The hidden states that a row keeps until a head has read them."""

import mlx.core as mx
import pytest

from backend.engine.rows.row import MOST_TOKENS, RowStates

pytestmark = pytest.mark.mlx


def states(*values):
    """Return those of a layer [1, T, 1]."""
    return mx.array(values, mx.float32)[None, :, None]


def test_those_of_consecutive_tokens_are_there():
    row = RowStates()
    row.add([states(1, 2, 3, 9)], 0, 3, 3)
    row.add([states(4)], 0, 1, 4)
    assert row.first == 0
    assert row.taken(1, 4).tolist() == [[2], [3], [4]]


@pytest.mark.parametrize("width", [2, 100])
def test_those_of_several_layers_stand_side_by_side(width):
    row, others = RowStates(), [0] * (width - 2)
    row.add([states(1, 2, *others), states(5, 6, *others)], 0, 2, 2)
    assert row.taken(0, 2).tolist() == [[1, 5], [2, 6]]


def test_those_of_another_row_are_left_out():
    row, pass_ = RowStates(), mx.array([[[1], [2]], [[3], [4]]])
    row.add([pass_], 1, 1, 1)
    assert row.taken(0, 1).tolist() == [[3]]


def test_a_gap_forgets_those_before_it():
    row = RowStates()
    row.add([states(1, 2)], 0, 2, 2)
    row.add([states(5)], 0, 1, 5)
    assert row.first == 4
    assert row.taken(4, 5).tolist() == [[5]]


def test_the_latest_can_be_taken_again():
    row = RowStates()
    for place in range(3):
        row.add([states(place)], 0, 1, place + 1)
    row.taken(0, 3)
    assert row.first == 2
    assert row.taken(2, 3).tolist() == [[2]]


@pytest.mark.parametrize("width", [1, 100, 3 * MOST_TOKENS])
def test_no_more_are_kept_than_a_head_reads(width):
    row, stop = RowStates(), 0
    while stop < 4 * MOST_TOKENS:
        stop += width
        row.add([mx.arange(stop - width, stop)[None, :, None]], 0, width, stop)
    assert MOST_TOKENS <= stop - row.first < MOST_TOKENS + width
    assert row.taken(stop - 2, stop).tolist() == [[stop - 2], [stop - 1]]
