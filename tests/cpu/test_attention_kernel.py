"""The kernel attends as a softmax in float64 does, and to a query alone as in company."""

import numpy as np
import pytest

from backend.cpu import attention_kernel, shared_work
from backend.cpu.attention_kernel import MOST_QUERIES, Stored, attend
from backend.cpu.kernels import kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")

ROWS, HEADS, REPEATS = 2, 3, 2


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def given(count=REPEATS, positions=50, width=16, value_width=24):
    """Return queries, keys and values."""
    queries = random(ROWS, HEADS, count, width)
    return (
        queries,
        random(ROWS, HEADS, positions, width),
        random(ROWS, HEADS, positions, value_width),
    )


def found(queries, keys, values, hidden=None, *, repeats=REPEATS, per_owner=1):
    """Return the attention and the logarithm of the sum of all weights."""
    stored = (Stored([array], array.shape[-1]) for array in (keys, values))
    parts = attend(queries, *stored, hidden, repeats=repeats, per_owner=per_owner)
    weighted, top, total = (part.astype(np.float64) for part in parts)
    highest = top.max(axis=0)
    weighted, total = ((part * np.exp(top - highest)).sum(axis=0) for part in (weighted, total))
    return weighted / total, highest + np.log(total)


def expected(queries, keys, values, hidden=None):
    scores = queries.astype(np.float64) @ keys.swapaxes(-1, -2)
    if hidden is not None:
        scores[np.broadcast_to(hidden, scores.shape)] = -np.inf
    weights = np.exp(scores)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ values / total, np.log(total)


def close(one, other):
    return all(np.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("positions", [1, 31, 32, 33, 511, 512, 513, 1100])
@pytest.mark.parametrize("count", [1, 2, 5, MOST_QUERIES])
def test_any_number_of_queries_sees_any_number_of_positions(count, positions):
    arrays = given(count, positions)
    assert close(found(*arrays), expected(*arrays))


@pytest.mark.parametrize("width", [8, 40, 256])
@pytest.mark.parametrize("value_width", [8, 40, 72, 256])
def test_keys_and_values_have_any_width_of_whole_registers(width, value_width):
    queries, *others = given(3, 40, width, value_width)
    arrays = (queries / width**0.5, *others)
    assert close(found(*arrays), expected(*arrays))


def test_queries_of_several_owners_have_masks_of_their_own():
    owners, per_owner, positions = 3, 2, 70
    queries, keys, values = given(owners * REPEATS * per_owner, positions)
    hidden = random(1, 1, owners, 1, per_owner, positions) > 0
    hidden[..., 0] = False
    by_query = np.broadcast_to(hidden, (1, 1, owners, REPEATS, per_owner, positions))
    ours = found(queries, keys, values, hidden, per_owner=per_owner)
    assert close(ours, expected(queries, keys, values, by_query.reshape(1, 1, -1, positions)))


def test_a_query_that_sees_nothing_has_no_weights():
    queries, keys, values = given(2, 40)
    hidden = np.zeros((ROWS, 1, 1, 1, 1, 40), np.bool_)
    hidden[1] = True
    stored = (Stored([array], array.shape[-1]) for array in (keys, values))
    weighted, top, total = attend(queries, *stored, hidden, repeats=2, per_owner=1)
    assert not weighted[:, 1].any()
    assert not total[:, 1].any()
    assert np.isneginf(top[:, 1]).all()
    assert np.isfinite(top[:, 0]).all()


def test_a_query_has_the_same_result_alone_and_in_company():
    queries, keys, values = given(5, 600)
    room = [np.concatenate([each, each + 9], axis=2) for each in (keys, values)]
    hidden = np.zeros((ROWS, 1, 1, 1, 1, 1200), np.bool_)
    hidden[..., 600:] = True
    together, _ = found(queries, *room, hidden)
    for n in range(5):
        alone, _ = found(queries[1:, :, n : n + 1], keys[1:], values[1:], repeats=1)
        assert np.array_equal(alone[0, :, 0], together[1, :, n])


def test_numbers_that_are_none_are_not_hidden():
    queries, keys, values = given(3, 40)
    keys[0, 0, 7] = np.nan
    attention, _ = found(queries, keys, values)
    assert np.isnan(attention[0, 0]).all()
    assert np.isfinite(attention[0, 1:]).all()


def test_scores_may_be_far_apart():
    queries, keys, values = given(2, 40)
    queries *= 1000.0
    scores = queries @ keys.swapaxes(-1, -2)
    best = np.take_along_axis(values, scores.argmax(axis=-1)[..., None], axis=2)
    assert np.allclose(found(queries, keys, values)[0], best, atol=1e-4)


def test_arrays_may_be_parts_of_others():
    queries, keys, values = given()
    larger = [np.concatenate([each, each], axis=2)[:, :, :50] for each in (keys, values)]
    steps = [np.repeat(each, 2, axis=3)[..., ::2] for each in (keys, values)]
    whole = found(queries, keys, values)
    for parts in (larger, steps):
        assert all(map(np.array_equal, found(queries, *parts), whole))


def test_threads_share_many_positions_without_a_difference(monkeypatch):
    arrays = given(4, 2000)
    alone = found(*arrays)
    shares = []

    def shared(compute, numbers, _products):
        middle = numbers[1] // 2
        for part in ((middle, numbers[1]), (0, middle)):
            shares.append(part)
            compute(part)

    monkeypatch.setattr(attention_kernel, "spread_range", shared)
    assert all(map(np.array_equal, found(*arrays), alone))
    assert shares == [(12, 24), (0, 12)]


@pytest.mark.parametrize(
    ("count", "width", "value_width"), [(1, 20, 16), (1, 16, 20), (MOST_QUERIES + 1, 16, 16)]
)
def test_other_widths_and_more_queries_are_left_to_others(count, width, value_width):
    queries, keys, values = given(count, 9, width, value_width)
    stored = (Stored([array], array.shape[-1]) for array in (keys, values))
    assert attend(queries, *stored, None, repeats=1, per_owner=1) is None


def test_work_is_shared_once_it_is_worth_a_thread():
    done = []
    shared_work.spread_range(done.append, (3, 9), shared_work.LEAST_SHARED // 6 - 1)
    assert done == [(3, 9)]
