import numpy as np
import pytest

from backend.core.prompt import MediaKind, PreparedMedium
from backend.model.vision.media_processor import (
    LostMediumError,
    as_processed,
    known_ids,
    longest_run,
    shown_pixels,
    with_own_tokens,
    with_run,
)


def medium(token_ids, upstream_ids=None, lead=""):
    inputs = {} if upstream_ids is None else {"input_ids": np.array([upstream_ids])}
    return PreparedMedium(MediaKind.IMAGE, b"", "", tuple(token_ids), inputs, lead=lead)


def test_ids_that_no_vocabulary_has_are_alike():
    assert known_ids([5, -200, -1, -2, 0]) == [5, -1, -1, -1, 0]


@pytest.mark.parametrize(
    ("ids", "run"), [([], (0, 0)), ([7], (0, 1)), ([1, 2, 2, 3], (1, 3)), ([1, 1, 2, 2], (0, 2))]
)
def test_the_longest_run_of_one_id_is_found(ids, run):
    assert longest_run(ids) == run


def test_the_longest_run_gets_another_token_and_length():
    assert with_run([1, -1, 2], 9, 0) == [-1, 2]
    assert with_run([1, -1, -1, 2], 9, 3) == [1, 9, 9, 9, 2]


def test_pixels_of_padding_are_not_counted():
    pixels = {"pixel_values": np.zeros((2, 3))}
    assert shown_pixels(pixels) == 6
    assert shown_pixels({**pixels, "pixel_attention_mask": np.array([[1, 1, 0]])}) == 2
    assert shown_pixels({"input_features": np.zeros(3)}) == 0


def test_media_in_the_tokens_of_mlx_vlm_become_those_of_this_backend():
    media = [medium([9, 9], [-1]), medium([4, 9, 5], [4, 6, 6, 5]), medium([7])]
    ids = [1, -200, 2, 4, 6, 6, 5, 7, 3]
    assert with_own_tokens(ids, media) == [1, 9, 9, 2, 4, 9, 5, 7, 3]


def test_a_medium_that_mlx_vlm_writes_otherwise_is_lost():
    with pytest.raises(LostMediumError) as caught:
        with_own_tokens([1, -1, 2], [medium([9], [-1]), medium([9], [-1])])
    assert caught.value.number == 1


def test_a_prompt_begins_once_with_what_its_media_require():
    media = [medium([9], lead="<s>")]
    assert as_processed("a", media) == as_processed("<s>a", media) == "<s>a"
    assert as_processed("a", [medium([9])]) == as_processed("a", []) == "a"
