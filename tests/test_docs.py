import re
from dataclasses import fields
from pathlib import Path

from backend.config import TuningOptions

DOCS = Path(__file__).parent.parent / "docs"


def test_the_options_page_lists_every_option_with_its_default():
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    expected = {
        field.name: "none" if field.default is None else f"`{field.default!s}`"
        for field in fields(TuningOptions)
    }
    expected = {
        name: text.replace("True", "true").replace("False", "false")
        for name, text in expected.items()
    }
    assert {name: rows.get(name) for name in expected} == expected


def test_pages_link_to_pages_that_exist():
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not re.match(r"\w+:", target):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
