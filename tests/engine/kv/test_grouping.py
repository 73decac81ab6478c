from hypothesis import given
from hypothesis import strategies as st

from backend.engine.kv.ledger import COPY_COST, HORIZON_PASSES, max_padding, regrouped, with_spare
from backend.engine.rows.admission import PADDING_SHARE, _room

OVERHEAD = 100.0


def cost(groups, lengths, overhead):
    return sum(overhead + len(g) * max(lengths[row] for row in g) for g in groups)


def copied(before, after, lengths):
    kept = {tuple(sorted(g)) for g in before}
    return sum(lengths[row] for g in after if tuple(sorted(g)) not in kept for row in g)


def singles(lengths):
    return [[row] for row in range(len(lengths))]


def test_rows_of_similar_length_share_a_group():
    lengths = [100, 105, 110, 6000]
    groups = regrouped(singles(lengths), lengths, OVERHEAD)
    assert sorted(map(sorted, groups)) == [[0, 1, 2], [3]]


def test_long_rows_stay_apart_because_their_copies_cost_more_than_a_group():
    lengths = [32_000, 32_000]
    assert len(regrouped(singles(lengths), lengths, OVERHEAD)) == 2


def test_a_short_row_that_joins_leaves_the_group_of_the_long_ones_as_it_is():
    lengths = [6000, 6001, 6002, 80]
    before = [[2, 0, 1], [3]]
    assert [2, 0, 1] in regrouped(before, lengths, OVERHEAD)


def test_a_group_whose_rows_have_drifted_apart_is_cut():
    lengths = [50, 60, 4000]
    assert sorted(map(sorted, regrouped([[0, 1, 2]], lengths, OVERHEAD))) == [[0, 1], [2]]


def test_without_overhead_every_row_is_a_group_and_with_infinite_overhead_none():
    lengths = [1, 20, 90]
    assert len(regrouped(singles(lengths), lengths, 0.0)) == 3
    assert len(regrouped(singles(lengths), lengths, float("inf"))) == 1


@given(st.lists(st.integers(0, 8000), min_size=1, max_size=12))
def test_no_row_is_padded_by_more_than_memory_is_reserved_for(lengths):
    groups = regrouped(singles(lengths), lengths, float("inf"))
    for group in groups:
        longest = max(lengths[row] for row in group)
        for row in group:
            assert longest - lengths[row] <= max_padding(longest)
            room = _room(lengths[row]) + PADDING_SHARE * lengths[row]
            assert with_spare(longest) <= room


def test_rows_without_positions_are_grouped():
    assert regrouped([[0], [1]], [0, 0], OVERHEAD) == [[0, 1]]


@given(
    st.lists(st.integers(0, 8000), min_size=1, max_size=12),
    st.floats(0, 5000),
    st.randoms(use_true_random=False),
)
def test_a_change_keeps_all_rows_and_pays_for_itself(lengths, overhead, rng):
    groups: dict[int, list[int]] = {}
    for row in range(len(lengths)):
        groups.setdefault(rng.randrange(len(lengths)), []).append(row)
    before = list(groups.values())
    after = regrouped(before, lengths, overhead)
    assert sorted(row for group in after for row in group) == list(range(len(lengths)))
    saved = cost(before, lengths, overhead) - cost(after, lengths, overhead)
    assert HORIZON_PASSES * saved >= COPY_COST * copied(before, after, lengths) - 1e-6
