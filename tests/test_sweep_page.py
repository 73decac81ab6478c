"""The page of families: those of which the same is told share a row, and nothing is lost."""

from pathlib import Path

from scripts.sweep.table import Row, joined, page, rows_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
EQUAL = {"library": "mlx-lm", "text": "equal", "batched": "yes", "prompt_cache": "yes"}
ROWS = [
    Row("apple", **EQUAL),
    Row("banana", **EQUAL | {"batched": "no: a | b"}),
    Row("cherry", **EQUAL),
]


def test_families_of_which_the_same_is_told_share_a_row():
    assert [row.family for row in joined(ROWS)] == ["apple, cherry", "banana"]


def test_the_rows_of_a_page_are_those_it_was_made_of():
    assert rows_of(page(ROWS, ["durian"])) == ROWS


def test_a_refusal_is_written_without_its_formula():
    refused = "refused: image input of this model is not served: it has no processor"
    (row,) = rows_of(page([Row("apple", **EQUAL, images=refused)], []))
    assert row.images == "refused: it has no processor"


def test_every_family_of_the_page_has_one_row_per_library():
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert len({(row.family, row.library) for row in rows}) == len(rows) > 200
