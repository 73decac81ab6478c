import pytest

from backend.formats.code_span import CodeTracker


def track(chunks):
    tracker = CodeTracker()
    for chunk in chunks:
        tracker.follow(chunk)
    tracker.settle()
    return tracker.is_open, tracker.is_fenced, tracker.has_prose


@pytest.mark.parametrize(
    ("text", "is_open", "is_fenced", "has_prose"),
    [
        ("", False, False, False),
        ("word", False, False, True),
        ("\n ", False, False, False),
        ("see `", True, False, True),
        ("`f` ", False, False, True),
        ("``a ` b", True, False, True),
        ("``a ` b``", False, False, True),
        ("a ` b\n", False, False, True),
        ("```\n", True, True, False),
        ("```py\nx = 1\n", True, True, False),
        ("   ```\n", True, True, False),
        ("    ```\n", False, False, True),
        ("~~~\n```\n", True, True, False),
        ("```\nf\n```", False, False, False),
        ("```\nf\n``\n", True, True, False),
        ("````\n```\n", True, True, False),
        ("```\nf ```\n", True, True, False),
        ("Hi:\n```\n", True, True, True),
        ("```\n```\nSo `", True, False, True),
        ("a ~~b~~ c", False, False, True),
        ("So:\n\n    x", True, False, True),
        ("So:\n\n    x\n\n    y\n     ", True, False, True),
        ("So:\n\n\tx", True, False, True),
        ("So:\n    x", False, False, True),
        ("So:\n\n   x", False, False, True),
        ("So:\n\n    x\n\ny", False, False, True),
        ("    x", False, False, True),
        ("1. a\n\n  x", True, False, True),
        ("- a\n\nb\n\n  x", False, False, True),
        ("-a\n\n  x", False, False, True),
        ("- a\n    ```\nx", True, True, True),
        ("> a", True, False, True),
        ("> a\nb", False, False, True),
        ("a > b", False, False, True),
    ],
)
def test_code_is_told_from_prose_however_the_text_is_cut(text, is_open, is_fenced, has_prose):
    assert track([text]) == track(text) == (is_open, is_fenced, has_prose)


def test_a_fenced_block_is_told_from_those_before_it():
    tracker = CodeTracker()
    tracker.follow("```\nf\n```\n```\n")
    assert (tracker.is_fenced, tracker.fences_begun) == (True, 2)
