import mlx.core as mx
import numpy as np
import pytest

from backend.sampling.sampler import largest

pytestmark = pytest.mark.mlx


def logits(rows: int, vocab_size: int, levels: int) -> mx.array:
    """Numbers of few levels, so that most are equal to others."""
    numbers = mx.random.randint(-levels, levels, (rows, vocab_size), key=mx.random.key(1))
    return numbers.astype(mx.float32) / 8.0


@pytest.mark.parametrize("vocab_size", [7, 64, 1000, 8192, 20_011])
@pytest.mark.parametrize("count", [1, 3, 7, 40])
@pytest.mark.parametrize("levels", [1, 30, 10_000])
def test_the_largest_come_first_and_equal_ones_by_id(vocab_size, count, levels):
    count = min(count, vocab_size)
    x = logits(3, vocab_size, levels)
    ids, values = largest(x, count)
    numbers = np.array(x)
    by_id = np.broadcast_to(np.arange(vocab_size), numbers.shape)
    expected = np.lexsort((by_id, -numbers), axis=-1)[:, :count]
    assert np.array(ids).tolist() == expected.tolist()
    assert np.array(values).tolist() == np.take_along_axis(numbers, expected, axis=1).tolist()


def test_tokens_that_a_mask_forbids_come_last_and_stay_forbidden():
    x = mx.full((1, 9000), -mx.inf)
    x[0, 8999], x[0, 4000] = -3.0, mx.array(-5.0)
    ids, values = largest(x, 3)
    assert ids[0, :2].tolist() == [8999, 4000]
    assert values.tolist() == [[-3.0, -5.0, -mx.inf]]


def test_the_order_of_the_first_does_not_depend_on_their_number():
    x = logits(2, 20_000, 30)
    few, many = largest(x, 5)[0], largest(x, 200)[0]
    assert few.tolist() == many[:, :5].tolist()
