from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.cache.token_key import TokenKey

TOKENS = st.integers(min_value=-(2**63), max_value=2**63 - 1)
FEW_TOKENS = st.sampled_from([-1, 0, 1])


@given(st.lists(TOKENS))
def test_a_key_holds_the_ids_it_was_made_of(ids):
    key = TokenKey.from_ids(ids)
    assert list(key) == ids
    assert len(key) == len(ids)
    assert len(key.packed) == 8 * len(ids)
    assert TokenKey(key.packed) == key


@given(st.lists(TOKENS, max_size=4), st.integers(min_value=0))
@pytest.mark.parametrize("sign", [1, -1])
def test_an_id_beyond_64_bits_is_refused(sign, ids, excess):
    beyond = 2**63 + excess if sign > 0 else -(2**63) - 1 - excess
    with pytest.raises(ValueError, match="64 signed bits"):
        TokenKey.from_ids([*ids, beyond])


def test_bytes_that_are_no_whole_tokens_are_refused():
    with pytest.raises(ValueError, match="no whole number of tokens"):
        TokenKey(b"seven b")


@given(st.lists(TOKENS), st.slices(12))
def test_a_slice_is_the_key_of_the_sliced_ids(ids, part):
    assert TokenKey.from_ids(ids)[part] == TokenKey.from_ids(ids[part])


@given(st.lists(TOKENS, min_size=1), st.data())
def test_an_index_gives_the_id(ids, data):
    index = data.draw(st.integers(-len(ids), len(ids) - 1))
    assert TokenKey.from_ids(ids)[index] == ids[index]


@given(st.lists(st.lists(TOKENS)))
def test_parts_in_a_row_read_as_one_key(parts):
    joined = TokenKey.concat(TokenKey.from_ids(ids) for ids in parts)
    assert list(joined) == list(chain.from_iterable(parts))


@given(st.lists(FEW_TOKENS), st.lists(FEW_TOKENS), st.integers(0, 12))
def test_the_common_prefix_is_that_of_the_ids(ids, other, start):
    agreed = TokenKey.from_ids(ids).common_prefix(TokenKey.from_ids(other), start)
    rest = ids[start:]
    assert rest[:agreed] == other[:agreed]
    assert agreed == min(len(rest), len(other)) or rest[agreed] != other[agreed]


@given(st.integers(0, 10_000), st.integers(0, 50))
def test_the_common_prefix_of_long_keys_ends_where_they_differ(place, start):
    ids = list(range(10_050))
    other = ids[start : start + 10_000]
    other[place:] = [-1] * (len(other) - place)
    key = TokenKey.from_ids(ids)
    assert key.common_prefix(TokenKey.from_ids(other), start) == place


def test_tokens_that_differ_in_one_byte_are_different_tokens():
    ids = TokenKey.from_ids([1, 256, -1])
    assert ids.common_prefix(TokenKey.from_ids([1, 257, -1])) == 1
    assert ids.common_prefix(TokenKey.from_ids([1, 512, -1])) == 1


def test_equal_keys_are_one_key_of_a_dict():
    assert {TokenKey.from_ids((1, -2)): "found"}[TokenKey.from_ids([1, -2])] == "found"


def test_a_key_does_not_print_its_tokens():
    assert repr(TokenKey.from_ids(range(10_000))) == "<TokenKey of 10000 tokens>"
