"""Pieces of code to edit, as the benchmark asks for them and a model is trained on them."""

import re
from random import Random

import pytest

from scripts.demo_model.edits import draw_edit

LINES = 10


@pytest.mark.parametrize("is_known", [True, False])
def test_an_edit_renames_one_identifier_and_nothing_else(is_known):
    for seed in range(50):
        edit = draw_edit(Random(seed), LINES, is_known=is_known)
        asked, _, code = edit.question.partition("\n")
        old, new = re.fullmatch(r"Rename (\w+) to (\w+):", asked).groups()
        pairs = list(zip(re.split(r"(\w+)", code), re.split(r"(\w+)", edit.answer), strict=True))
        assert len(edit.answer.splitlines()) == LINES
        assert {pair for pair in pairs if pair[0] != pair[1]} == {(old, new)}
        assert new not in code
        assert sum(word == old for word, _ in pairs) < LINES
