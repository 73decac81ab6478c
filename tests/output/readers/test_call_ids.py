"""The ids of calls: names in them, and none twice in a conversation."""

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.formats.registry import TOOL_FORMATS
from backend.output.readers.reader import CallIds, ids_of, is_nameless, name_in_id

NAMES = ("bash", "read_file", "read_file_2", "mcp__srv__read_file_2", "get-weather.v2", "f", "rm")
FORMS = (
    *("functions.{}:5", "functions.{}", "{}:0", "{}", "functions_{}_5", "functions{}:5"),
    *("{}_5", "function.{}:0", "call_{}_5", "functions.functions.{}:0", "functions.{}#1"),
    *("chatcmpl-tool-{}:0", "functions.default_api.{}:3", "functions-{}-5", "{}.5"),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_offered_name_in_an_id_decides(form, name):
    assert name_in_id(form.format(name), NAMES) == name


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functionsbash5", "bash"),
        ("functions.bash0", "bash"),
        ("functions.bash:ab12", "bash"),
        ("functions_bash_0a1b2c3d", "bash"),
        ("functions.read_file_21", "read_file"),
        ("functions.read_file_2_1", "read_file_2"),
        ("functions.read_file2", "read_file"),
    ],
)
def test_a_number_is_told_from_a_name(call_id, name):
    assert name_in_id(call_id, NAMES) == name


@pytest.mark.parametrize(
    "call_id",
    [
        *("functions.rm_rf:0", "functions.read_file_lines:0", "functions.bashful:1", "call_ab12CD"),
        *("functions.bash-x:0", "functions.:0", "call00003", "functions_read_files_2", "xbash_1"),
    ],
)
def test_a_part_of_another_name_is_no_name(call_id):
    assert name_in_id(call_id, NAMES) == ""


@pytest.mark.parametrize(
    ("call_id", "expected"),
    [
        *[(call_id, True) for call_id in ("call00003", "call_ab12CD", "functions:0", "0", "")],
        *[(call_id, True) for call_id in ("chatcmpl-tool-1f2e", "toolu_01A", "functions.0")],
        *[(call_id, False) for call_id in ("functions.rm_rf:0", "rm_rf:0", "weather")],
    ],
)
def test_an_id_with_another_name_is_not_nameless(call_id, expected):
    assert is_nameless(call_id) is expected


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=8), max_size=4))
def test_no_text_raises_and_only_offered_names_are_found(call_id, names):
    assert name_in_id(call_id, names) in ("", *names)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=lambda row: row.name)
def test_no_id_of_a_conversation_comes_again(tool_format):
    used = ("functions.f:0", "functions.f:1", "aB3dE5fG7", "", "call_1")
    ids = ids_of(tool_format, used)
    taken = [ids.take("f", written) for written in (*used, "functions.f:5", "", "", "")]
    assert len({*taken, *used} - {""}) == len(taken) + 4
    assert all(taken)


def test_kimi_counts_the_calls_of_a_conversation():
    ids = ids_of(golden.tool_format("kimi_k2"), ("functions.f:0", "call_x"))
    assert ids.take("g", "functions.g:2") == "functions.g:2"
    assert [ids.take("f", "functions.f:0"), ids.take("g", "")] == ["functions.f:3", "functions.g:4"]


def test_a_made_id_leaves_known_ones_out():
    ids = CallIds(lambda name, number: f"{name}{number}", ("f2", "f1"))
    assert [ids.take("f"), ids.take("f")] == ["f3", "f4"]
