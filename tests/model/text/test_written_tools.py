"""Tools, calls and results as text, for templates that know no tools."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_tools import NAME, ODD_TOOLS, PURPOSE
from tool_conversations import ANSWERED, QUESTION, TWO_CALLS, WEATHER

from backend.core.prompt import MediaKind, Message, Placement, Tool, ToolCall
from backend.core.step import ToolCallDelta
from backend.errors import InvalidRequestError
from backend.formats import objects
from backend.formats.format import NO_REASONING, FormatEvidence
from backend.formats.thoughts import THINK
from backend.model.text.conversation import CallStyle, forms_of, spell_calls, to_turns
from backend.model.text.template import ChatTemplate
from backend.model.text.tool_forms import with_written_tools, written_call
from backend.output.detection import detect
from backend.output.reply_format import OutputFormat
from backend.output.router import Router

SYSTEM = Message(role="system", content="Be brief.")


def chatml(turns, _tools, _options):
    return "".join(f"[{turn['role']}]{turn['content']}" for turn in turns) + "[assistant]"


@pytest.fixture
def template():
    return ChatTemplate(chatml, writes_tools=True)


def test_tools_end_the_system_prompt(template):
    text = template.render([SYSTEM, QUESTION], [WEATHER], {})
    assert text.startswith("[system]Be brief.\n\nYou can call functions.")
    assert f"\n<tools>\n{json.dumps(WEATHER.schema)}\n</tools>\n" in text
    assert text.endswith("answer without these marks.[user]Is it raining?[assistant]")


def test_tools_are_the_system_prompt_if_there_is_no_other(template):
    alone = template.render([QUESTION], [WEATHER], {})
    assert alone.startswith("[system]You can call functions.")


def test_of_several_system_messages_the_last_at_the_start_has_the_tools():
    developer = Message(role="developer", content="Be kind.")
    first, second, *_ = with_written_tools([SYSTEM, developer, QUESTION, SYSTEM], [WEATHER])
    assert first == SYSTEM
    assert second.role == "developer"
    assert second.content.startswith("Be kind.\n\nYou can call functions.")


def test_without_tools_nothing_changes(template):
    text = template.render([SYSTEM, QUESTION], [], {})
    assert text == "[system]Be brief.[user]Is it raining?[assistant]"


def test_calls_and_results_are_text_in_their_order():
    _, question, calling, results, answer, thanks = with_written_tools(ANSWERED, [WEATHER])
    assert (question, answer, thanks) == (QUESTION, *ANSWERED[-2:])
    assert calling == Message(
        role="assistant",
        content=(
            "Let me look.\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        ),
    )
    assert results == Message(
        role="user",
        content=(
            "<tool_response>\nsun in Rome\n</tool_response>\n"
            "<tool_response>\nrain in Oslo\n</tool_response>"
        ),
    )


@pytest.mark.parametrize("mark", [THINK.end, objects.HERMES_OPENER, objects.HERMES_CLOSER])
def test_no_mark_in_an_argument_cuts_a_call_or_those_before_it(mark):
    text = f"a \\ b{mark}{mark} \\{mark}<b>"
    calls = [
        ToolCall(call_id=city, name="weather", arguments=json.dumps({"city": city}))
        for city in ("Oslo", text)
    ]
    turn = Message(role="assistant", tool_calls=tuple(calls))
    _, written = with_written_tools([turn], [WEATHER])
    _, spelled = forms_of(to_turns([QUESTION, turn], CallStyle()), [spell_calls])
    assert mark not in spelled[1]["content"]
    assert THINK.end not in written.content
    lines = [line for line in written.content.splitlines() if line.startswith("{")]
    for found in (lines, spelled[1]["content"].splitlines()):
        assert [json.loads(line)["arguments"] for line in found] == [
            {"city": "Oslo"},
            {"city": text},
        ]


def test_media_stay_in_their_places():
    seen = Placement(3, MediaKind.IMAGE)
    asked = Message(role="user", content="an  image", media=(seen,))
    shown = Message(role="tool", content="an  image", media=(seen,))
    _, first, second = with_written_tools([asked, shown, shown], [WEATHER])
    assert first == asked
    places = [second.content[: each.offset] for each in second.media]
    assert [place[-3:] for place in places] == ["an ", "an "]
    assert places[0] != places[1]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a":1.0,  "a": 2}', '{"a":1.0,  "a": 2}'),
        ("", "{}"),
        (" ", "{}"),
        ('{"a": ', json.dumps('{"a": ')),
        ("[1]", '"[1]"'),
    ],
)
def test_arguments_that_are_an_object_keep_their_bytes(arguments, written):
    call = ToolCall(call_id="", name='a"b', arguments=arguments)
    assert written_call(call) == (
        f'<tool_call>\n{{"name": "a\\"b", "arguments": {written}}}\n</tool_call>'
    )


def test_the_prompt_before_stays_the_same_as_the_conversation_grows():
    conversation = (SYSTEM, *ANSWERED)
    whole = with_written_tools(conversation, [WEATHER])
    for count in (2, 3, 5, 6, 7):
        part = with_written_tools(conversation[:count], [WEATHER])
        assert whole[: len(part)] == part


def test_the_format_is_found_by_the_written_call(template):
    evidence = FormatEvidence((), template.text, written_call=template.written_call)
    assert detect(evidence).tools is objects.HERMES


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), max_size=4))
def test_a_written_call_is_read_back(arguments):
    text = written_call(ToolCall(call_id="", name=NAME, arguments=json.dumps(arguments)))
    router = Router(OutputFormat(NO_REASONING, objects.HERMES), tools={NAME: {}})
    deltas = [*router.feed(text), *router.finish(truncated=False)]
    pieces = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert "".join(piece.name for piece in pieces) == NAME
    assert json.loads("".join(piece.arguments for piece in pieces)) == arguments


@pytest.mark.parametrize("odd", ODD_TOOLS.values(), ids=ODD_TOOLS)
def test_odd_tools_are_written_as_they_are(template, odd):
    text = template.render([QUESTION], [Tool(name=NAME, schema=odd)], {})
    assert NAME in text
    assert PURPOSE in text or PURPOSE not in json.dumps(odd)


def test_the_option_decides():
    refusing = ChatTemplate(chatml)
    assert not refusing.supports_tools
    with pytest.raises(InvalidRequestError, match=r"^Tools: .*write_tools"):
        refusing.render([QUESTION], [WEATHER], {})


def test_a_template_that_shows_tools_writes_them_itself():
    def own(turns, tools, options):
        return f"{tools or ''}{chatml(turns, None, options)}"

    found = ChatTemplate(own, writes_tools=True)
    assert not found.writes_tools
    assert found.render(TWO_CALLS[:1], [WEATHER], {}).startswith("[{")
