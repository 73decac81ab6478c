"""Names of tools that a format can carry."""

import pytest

from backend.formats.registry import TOOL_FORMATS
from backend.output.tool_names import can_carry

ORDINARY = ("get_weather", "a.b", "x-foo", "browser:open", "f1", "user", "json")
ODD = ("a b", "a<b", "</a>", 'a"b', "a\\b", "a\nb", "$top", "filter[x]", "a(b", "<|call|>", "")
# Names that have a meaning in a format's own syntax, or end a part of it.
REFUSED = {
    "harmony": {"a b", "a<b", "</a>", "a\nb", "<|call|>", ""},
    "muse_spark": {"self", ""},
    "functionary": {"all", ""},
}


@pytest.mark.parametrize("known", TOOL_FORMATS, ids=lambda known: known.name)
def test_every_format_carries_ordinary_names_and_most_others(known):
    refused = REFUSED.get(known.name, {""} if known.frames else set())
    names = (*ORDINARY, *ODD, "self", "all")
    assert {name for name in names if not can_carry(known, name)} == refused
