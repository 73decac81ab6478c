"""Remembered features and positions of media, with towers that compute nothing."""

from dataclasses import dataclass

import pytest

from backend.core.prompt import MediaSpan
from backend.engine.passes.feeder import MAX_LENGTHS, MediaMemo

pytestmark = pytest.mark.mlx

TOKENS = [1, 2, 3, 4]


@dataclass(frozen=True)
class Features:
    nbytes: int
    rope_length: int | None


class Towers:
    def __init__(self, nbytes=10, rope_length=2):
        self._features = Features(nbytes, rope_length)

    def embed_media(self, _token_ids, _inputs):
        return self._features


def span(number):
    return MediaSpan(0, len(TOKENS), str(number).encode(), {})


def test_a_medium_is_encoded_once_while_it_is_remembered():
    memo = MediaMemo(Towers(), budget_bytes=20)
    for number in (1, 2, 1, 3, 1, 2):
        memo.features(span(number), TOKENS)
    assert memo.runs == 4  # the third made room by forgetting the second
    assert memo.nbytes == 20


def test_one_medium_that_is_larger_than_the_budget_is_kept():
    memo = MediaMemo(Towers(nbytes=100), budget_bytes=20)
    memo.features(span(1), TOKENS)
    memo.features(span(1), TOKENS)
    assert (memo.runs, memo.nbytes) == (1, 100)


def test_positions_are_known_of_a_medium_whose_features_were_forgotten():
    memo = MediaMemo(Towers(), budget_bytes=10)
    memo.features(span(1), TOKENS)
    memo.features(span(2), TOKENS)
    assert memo.rope_length(span(1), TOKENS) == 2
    assert memo.runs == 2


def test_a_model_without_rope_positions_counts_tokens():
    memo = MediaMemo(Towers(rope_length=None), budget_bytes=10)
    assert memo.rope_length(span(1), TOKENS) == len(TOKENS)


def test_positions_are_found_again_when_only_they_were_forgotten():
    memo = MediaMemo(Towers(nbytes=0), budget_bytes=10)
    for number in range(MAX_LENGTHS + 1):
        memo.features(span(number), TOKENS)
    assert memo.rope_length(span(0), TOKENS) == 2
