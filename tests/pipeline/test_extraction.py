"""Words and ranges of an extractor: as mlx-vlm's, and in a time that no text makes long."""

from itertools import combinations
from random import Random

import pytest

from backend.pipeline.extraction import WORD, apart

TEXTS = [
    "Mail ada.b+c@d-e.co.uk, or @ada_b; see https://a.b/c?d=e. www.x.y!",
    "well-known snake_case_word -x- a--b 3.5% 'tis É-Ö 漢字kana🙂",
    "a@b a@b. @ .a@b.c %%@x.de @foo.bar@x.com ſK@K.ſs",
    " \n\t",
]


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_that_the_model_was_trained_with(text):
    from mlx_vlm.models.gliner2_5.gliner2_5 import WORD_PATTERNS

    wanted = [match.span() for match in WORD_PATTERNS["whitespace"].finditer(text)]
    assert [match.span() for match in WORD.finditer(text)] == wanted


@pytest.mark.parametrize("text", ["%" * 500_000, "a.@" + "." * 500_000, "a@" * 200_000])
def test_no_text_makes_words_quadratic(text):
    assert "".join(match.group() for match in WORD.finditer(text)) == text


@pytest.mark.parametrize("seed", range(50))
def test_of_overlapping_ranges_those_with_the_highest_sum_are_kept(seed):
    random = Random(seed)
    starts = [random.randrange(12) for _ in range(8)]
    ranges = {(start, start + random.randint(1, 4)): random.random() for start in starts}
    choices = [
        chosen
        for count in range(len(ranges) + 1)
        for chosen in combinations(sorted(ranges), count)
        if all(one[1] <= other[0] for one, other in combinations(chosen, 2))
    ]
    best = max(sum(ranges[each] for each in chosen) for chosen in choices)
    kept = apart(ranges)
    assert tuple(kept) in choices
    assert sum(ranges[each] for each in kept) == pytest.approx(best)
