import random

import pytest

from backend.cache.books.volatile import MIN_LOST_TOKENS, agrees_again
from backend.cache.token_key import TokenKey

STORED = random.Random(3).sample(range(10_000), 700)


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
