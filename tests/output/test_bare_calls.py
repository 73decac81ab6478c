"""Calls without their format's markers: models of all families lapse into JSON alone."""

import golden
import pytest
from tool_replies import FORMATS, TOOLS

from backend.core.step import ContentDelta, FinishReason
from backend.output.replay import cut_evenly
from backend.output.reply import ReplySpec

SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
CALL = '{"name": "note_add", "arguments": {"text": "milk"}}'
OTHER = '{"name": "clock_now", "arguments": {}}'
MADE = (("note_add", '{"text": "milk"}'),)
# The messages of these have recipients.
UNABLE = {
    name for name, reply in FORMATS.items() if golden.tool_format(reply.parser or name).owns_reply
}
BARE = sorted(FORMATS.keys() - UNABLE)


def played(name, text, *, is_ruled=False):
    reply = FORMATS[name]
    spec = ReplySpec(
        format=golden.named_format(reply.parser or name, reply.reasoning),
        tools=SCHEMAS,
        is_ruled=is_ruled,
    )
    whole, *cut = [golden.play(spec, chunks) for chunks in ([text], cut_evenly(text, 1))]
    assert [(each.content, golden.named_calls(each)) for each in cut] == [
        (whole.content, golden.named_calls(whole))
    ]
    return whole.content, golden.named_calls(whole), whole.finish.reason


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize(
    "text", [CALL, f"\n{CALL}\n", f"```json\n{CALL}\n```", f"```\n{CALL}\n```"]
)
@pytest.mark.one_in(2)
def test_a_call_without_any_marker_is_one_at_the_beginning_of_an_answer(name, text):
    content, calls, finish = played(name, text)
    assert (content.strip(), calls, finish) == ("", MADE, FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "arguments": {"text": "milk"}}',
        '{"name": "note_add", "description": "adds a note"}',
        '{"note": "note_add", "arguments": {}}',
        '[{"name": "Alice", "arguments": 2}]',
        "{}",
        "[]",
        "[1, 2]",
        "{",
        f"It is called so: {CALL}",
        f"It is called so:\n```json\n{CALL}\n```",
    ],
)
@pytest.mark.one_in(4)
def test_other_json_and_a_call_after_prose_are_content(name, text):
    assert played(name, text) == (text, (), FinishReason.STOP)


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
        f"```json\n{CALL}\n```\n```json\n{OTHER}\n```",
        f"{CALL}\n{OTHER}",
        f"[{CALL}, {OTHER}]",
        f"<tools>\n{CALL}\n</tools>\n<tools>\n{OTHER}\n</tools>",
    ],
)
def test_more_calls_may_follow(text):
    calls = (*MADE, ("clock_now", "{}"))
    assert played("hermes_json", text) == ("", calls, FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("name", ["hermes_json", "glm4", "mistral"])
def test_an_answer_that_a_schema_rules_is_content_though_it_looks_like_a_call(name):
    assert played(name, CALL, is_ruled=True) == (CALL, (), FinishReason.STOP)


@pytest.mark.parametrize("name", ["hermes_json", "llama3_json", "granite", "glm4"])
@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ('{"note_add": "', 'adds a note", "clock_now": "tells the time"}'),
        ('{\n  "note_add": ["', 'adds", "a", "note"]}'),
        ('{"note_add": null, "x": "', 'a note"}'),
        ('{"name": "note_add", "why": "', 'the list is empty"}'),
        ('{"name": "note_add", "id": 3, "text": "', 'the list is empty"}'),
        ('{"tool": "note_add", "reason": "', 'the list is empty"}'),
        ('{"type": "function", "function": {"name": "note_add", "description": "', 'adds"}}'),
        ('[{"name": "note_add", "description": "', 'adds a note"}]'),
        ('["note_add", "', 'clock_now"]'),
        ("{note_add}, ", "a set, has one element"),
        ('{"name": "note_add"} ', "would be the name"),
        ('{"function": {"name": "note_add"}} ', "would be the name"),
    ],
)
def test_json_about_an_offered_tool_streams_once_a_key_or_value_tells_it_from_a_call(
    name, begun, rest
):
    assert played(name, begun + rest) == (begun + rest, (), FinishReason.STOP)
    reply = FORMATS[name]
    spec = ReplySpec(
        format=golden.named_format(reply.parser or name, reply.reasoning), tools=SCHEMAS
    )
    first, *_ = (deltas for deltas, _ in golden.stream(spec, [begun, rest]))
    assert first == (ContentDelta(begun),)


@pytest.mark.parametrize("name", BARE)
def test_without_markers_a_name_alone_is_a_call_if_its_tool_requires_no_arguments(name):
    assert played(name, '{"name": "clock_now"}') == (
        "",
        (("clock_now", "{}"),),
        FinishReason.TOOL_CALLS,
    )
    assert played(name, '{"name": "note_add"}') == (
        '{"name": "note_add"}',
        (),
        FinishReason.STOP,
    )


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[{"name": "clock_now"}]', [("clock_now", "{}")]),
        ('{"type": "function", "function": {"name": "clock_now"}}', [("clock_now", "{}")]),
        (f'[{{"name": "clock_now"}}, {CALL}]', [("clock_now", "{}"), *MADE]),
        ('{"name": "note_add", "arguments": [{"text": "milk"}]}', MADE),
    ],
)
def test_a_bare_call_may_lack_arguments_or_have_them_in_a_list(text, calls):
    assert played("hermes_json", text) == ("", tuple(calls), FinishReason.TOOL_CALLS)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "clock_now", "type": "builtin"}',
        '[{"name": "clock_now"}, {"name": "clock_now"}]',
        '[{"name": "clock_now"}, {"name": "clo',
        '{"name": "note_add", "parameters": {"type": "object", "properties": {}}}',
        '[{"name": "note_add", "parameters": {"type": "object", "properties": {}}}]',
        '{"name": "note_add", "parameters": {"text": {"type": "string"}}}',
        '{"name": "note_add", "parameters": [{"name": "text", "type": "string"}]}',
    ],
)
@pytest.mark.parametrize("name", ["hermes_json", "xlam", "glm4"])
def test_json_that_describes_tools_is_content(name, text):
    assert played(name, text) == (text, (), FinishReason.STOP)


@pytest.mark.parametrize("tags", ["[1, 2]", '["a", "b"]'])
def test_a_list_in_the_damaged_arguments_of_a_call_is_no_list_of_data(tags):
    text = f'{{"name": "note_add", "arguments": {{""text": "x", "tags": {tags}}}}}'
    arguments = f'{{"\\"text": "x", "tags": {tags}}}'
    assert played("hermes_json", text) == ("", (("note_add", arguments),), FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("name", ["hermes_json", "xlam", "glm4", "mistral"])
@pytest.mark.parametrize(
    "text",
    [
        '[note_add(text="milk")]',
        ' [ note_add ( text = "milk" ), ]\n',
        '[functions.note_add(text="milk")]',
        '[note_add(text: "milk")]',
        '[note_add({"text": "milk"})]',
        '[note_add(text="""milk""")',
        '```python\n[note_add(text="milk")]\n```',
    ],
)
def test_a_bare_list_in_python_is_read_however_it_is_written(name, text):
    content, calls, finish = played(name, text)
    assert (content.strip(), calls, finish) == ("", MADE, FinishReason.TOOL_CALLS)


def test_a_bare_list_in_python_has_all_its_calls_and_ends_with_its_line():
    text = '[note_add(text="milk"), clock_now()]\n\nI add it.'
    calls = (*MADE, ("clock_now", "{}"))
    assert played("hermes_json", text) == ("\n\nI add it.", calls, FinishReason.TOOL_CALLS)


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("[clock_now() - ", "start]"),
        ("[clock_now()] r", "eturns the time."),
        ("[note_add(text=x) fo", "r x in notes]\n\nThis adds them."),
        ('[note_add(text="x") fo', "r x in notes]\n\nThis adds them."),
        ('[note_add(text="x")](', "#notes) adds"),
        ("[^", '1]: See note_add(text="x")'),
        ("[note_add] ", 'note_add(text="x") is a call'),
    ],
)
def test_other_python_in_brackets_streams_as_content(begun, rest):
    assert played("hermes_json", begun + rest) == (begun + rest, (), FinishReason.STOP)
    spec = ReplySpec(format=golden.named_format("hermes_json", "none"), tools=SCHEMAS)
    first, *_ = (deltas for deltas, _ in golden.stream(spec, [begun, rest]))
    assert "".join(delta.text for delta in first) == begun


def test_a_sentence_may_begin_with_a_python_call_without_arguments():
    for name in ("pythonic", "olmo3"):
        text = "[clock_now()] returns it."
        assert played(name, text) == (text, (), FinishReason.STOP)
    calls = (("clock_now", "{}"),)
    assert played("pythonic", "[clock_now()]") == ("", calls, FinishReason.TOOL_CALLS)
