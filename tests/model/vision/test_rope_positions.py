import pytest

from backend.model.vision.vision_network import RopePositions

pytestmark = pytest.mark.mlx


def test_positions_are_taken_in_order():
    row = RopePositions()
    assert row.take(3).tolist() == [[0, 1, 2]]
    assert row.take(1).tolist() == [[3]]


def test_rows_keep_their_own_positions_as_they_join_and_leave():
    batch = RopePositions.merge([RopePositions([5]), RopePositions([9])])
    batch.extend(RopePositions([2]))
    assert batch.take(2).tolist() == [[5, 6], [9, 10], [2, 3]]
    batch.filter([2, 0])
    assert batch.take(1).tolist() == [[4], [7]]
    assert batch.extract(1).upcoming == [8]
    assert batch.nbytes == 0
    assert batch.state == []
