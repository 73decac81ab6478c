import pytest

from backend.core.prompt import Message, ToolCall
from backend.errors import InvalidRequestError
from backend.model.text.conversation import (
    CALL_ID_CHARS,
    CallStyle,
    check_roles,
    merge_turns,
    shorten_call_ids,
    to_turns,
)


def call(arguments: str, call_id: str = "call_1") -> Message:
    return Message(
        role="assistant",
        tool_calls=(ToolCall(call_id=call_id, name="weather", arguments=arguments),),
    )


def arguments_of(message: Message, style: CallStyle | None = None) -> object:
    (turn,) = to_turns([message], style or CallStyle())
    return turn["tool_calls"][0]["function"]["arguments"]


def test_developer_becomes_system():
    turns = to_turns([Message(role="developer", content="d")], CallStyle())
    assert turns == [{"role": "system", "content": "d"}]


def test_parts_that_were_not_given_are_absent():
    (turn,) = to_turns([Message(role="user", content="u")], CallStyle())
    assert turn == {"role": "user", "content": "u"}


def test_name_result_id_and_thought_are_passed():
    message = Message(
        role="tool", content="4", name="add", tool_call_id="c1", reasoning_content="hm"
    )
    (turn,) = to_turns([message], CallStyle())
    assert turn == {
        "role": "tool",
        "content": "4",
        "name": "add",
        "tool_call_id": "c1",
        "reasoning_content": "hm",
    }


def test_past_calls_keep_the_openai_shape():
    (turn,) = to_turns([call('{"city": "Oslo"}')], CallStyle())
    assert turn["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Oslo"}},
        }
    ]


def test_json_arguments_become_an_object():
    assert arguments_of(call('{"city": "Oslo", "days": 2}')) == {"city": "Oslo", "days": 2}


@pytest.mark.parametrize("text", ['["Oslo"]', '"Oslo"', "3", "city: Oslo", "{broken", "[" * 10**5])
def test_arguments_that_are_no_object_stay_text(text: str):
    assert arguments_of(call(text)) == text


def test_empty_arguments_are_an_empty_object():
    assert arguments_of(call("")) == {}
    assert arguments_of(call(" "), CallStyle(arguments_as_text=True)) == "{}"


def test_only_the_content_beside_calls_follows_the_style():
    style = CallStyle(empty_content=None)
    silent, speaking, plain = to_turns(
        [
            call("{}"),
            Message(role="assistant", content="wait", tool_calls=call("{}").tool_calls),
            Message(role="assistant"),
        ],
        style,
    )
    assert (silent["content"], speaking["content"], plain["content"]) == (None, "wait", "")


def test_neighbours_of_one_role_merge_as_paragraphs():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert merge_turns(turns) == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]


@pytest.mark.parametrize(
    "second",
    [
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "user", "content": ""},
        {"role": "user", "content": "b", "name": "bob"},
        {"role": "system", "content": "b"},
    ],
)
def test_what_is_more_than_text_of_the_same_role_never_merges(second: dict[str, object]):
    turns = [{"role": "user", "content": "a"}, second]
    assert merge_turns(turns) == turns


def test_results_of_two_calls_never_merge():
    turns = [
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
    ]
    assert merge_turns(turns) == turns


def test_short_call_ids_still_pair_calls_with_results():
    result = Message(role="tool", content="sun", tool_call_id="call_0123456789abcdef")
    turns = to_turns([call("{}", result.tool_call_id), result], CallStyle())
    called, answered = shorten_call_ids(turns)
    short = called["tool_calls"][0]["id"]
    assert short == answered["tool_call_id"]
    assert len(short) == CALL_ID_CHARS
    assert short.isalnum()


def test_a_call_id_that_is_short_already_stays():
    assert shorten_call_ids([{"role": "tool", "tool_call_id": "abc123XYZ"}]) == [
        {"role": "tool", "tool_call_id": "abc123XYZ"}
    ]


def test_an_unknown_role_is_named_with_its_place():
    messages = [Message(role="user", content="q"), Message(role="wizard", content="w")]
    with pytest.raises(InvalidRequestError, match=r"^Messages\[1\]\.role: 'wizard'"):
        check_roles(messages, "")


@pytest.mark.parametrize("text", ["role == 'wizard'", 'role == "wizard"'])
def test_a_role_that_the_template_names_is_known(text: str):
    check_roles([Message(role="wizard", content="w")], text)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_the_roles_of_the_openai_api_are_known(role: str):
    check_roles([Message(role=role)], "")
