import random
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.cache.radix import MIN_LOST_TOKENS, TokenKey, agrees_again

TOKENS = st.integers(min_value=-(2**63), max_value=2**63 - 1)
STORED = random.Random(3).sample(range(10_000), 700)
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


def agrees(prompt, matched):
    return agrees_again(TokenKey.from_ids(prompt), matched, TokenKey.from_ids(STORED[matched:]))


@pytest.mark.parametrize("changed", [1, 2, 7, 16, 31])
@pytest.mark.parametrize("instead", [1, 2, 5, 16, 32])
def test_a_prompt_with_other_tokens_for_a_moment_agrees_again(changed, instead):
    prompt = [*STORED[:20], *range(-instead, 0), *STORED[20 + changed :]]
    assert agrees(prompt, 20)


def test_a_prompt_with_tokens_left_out_agrees_again():
    assert agrees([*STORED[:20], *STORED[23:]], 20)


def test_a_prompt_that_goes_on_otherwise_does_not_agree():
    assert not agrees([*STORED[:20], *range(20_000, 20_400)], 20)


def test_a_prompt_that_agrees_too_late_does_not():
    assert not agrees([*STORED[:20], *range(-60, 0), *STORED[80:]], 20)
    assert not agrees([*STORED[:20], -1, *STORED[600:]], 20)


def test_so_few_tokens_are_not_worth_a_word():
    prompt = [*STORED[:20], -1, *STORED[21:]]
    assert agrees(prompt[: 20 + MIN_LOST_TOKENS], 20)
    assert not agrees(prompt[: 19 + MIN_LOST_TOKENS], 20)


@pytest.mark.parametrize("prompt", [STORED, STORED[:300], [*STORED, 1, 2, 3], [], [1]])
def test_a_prompt_of_which_all_is_stored_does_not_agree_again(prompt):
    matched = min(len(prompt), len(STORED))
    assert not agrees(prompt, matched)


def test_runs_are_found_at_whole_tokens_only():
    """The bytes of a run may stand across two tokens."""
    prompt = [1 << 8] * 200
    beyond = TokenKey.from_ids([1] * 200)
    assert not agrees_again(TokenKey.from_ids(prompt), 0, beyond)
    shifted = TokenKey(beyond.packed[1:] + beyond.packed[:1])
    assert not agrees_again(shifted, 0, beyond)
