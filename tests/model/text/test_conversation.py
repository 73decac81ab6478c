"""Changes to messages that a template does not take as they are sent."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from message_shapes import (
    CONVERSATIONS,
    DEVELOPER,
    FUNCTION,
    MID,
    SHAPES,
    SILENT,
    STRANGER,
    A,
    S,
    U,
    calling,
    result,
    said,
)

from backend.core.prompt import MediaKind, Message, Placement, ToolCall
from backend.errors import InvalidRequestError
from backend.model.text.conversation import (
    CallStyle,
    Turn,
    answer_results,
    joined,
    lead_with_user,
    mark_between,
    mark_later,
    marked,
    merge_assistants,
    merge_leading,
    merge_users,
    open_with_user,
    orphans_as_text,
    strangers_as_text,
    to_turns,
)
from backend.model.text.template import ChatTemplate

Templates = Callable[[str], ChatTemplate]

NAMES = [
    *("plain", "gemma", "mistral", "xml", "one_call", "hermes_tool_use", "llama3", "deepseek"),
    *("system_first", "one_system", "thinking", "dated"),
]
MARKED = "<system>\nmidx\n</system>"


def turns(*messages: Message) -> Sequence[Turn]:
    return to_turns(messages, CallStyle())


def texts(repaired: Sequence[Turn]) -> list[tuple[object, object]]:
    return [(turn["role"], turn["content"]) for turn in repaired]


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_is_rendered_and_no_text_of_it_lost(chat_template: Templates, name: str):
    template = chat_template(name)
    for shape, messages in SHAPES.items():
        text = template.render(messages, [], {})
        words = [message.content.strip() for message in messages if message.content]
        assert [word for word in words if word not in text] == [], shape


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(messages=CONVERSATIONS)
def test_whatever_the_order_of_messages_nothing_is_refused_or_lost(
    chat_template: Templates, name: str, messages: Sequence[Message]
):
    text = chat_template(name).render(messages, [], {})
    assert [message for message in messages if message.content not in text] == []


@given(messages=CONVERSATIONS, more=CONVERSATIONS)
def test_what_comes_after_a_reply_changes_nothing_before_it(
    messages: Sequence[Message], more: Sequence[Message]
):
    later = turns(*messages, A, *more)
    for repair in (mark_later, mark_between, orphans_as_text, strangers_as_text, merge_leading):
        before = repair(turns(*messages))
        assert repair(later)[: len(before)] == before


def test_a_template_that_takes_later_system_messages_gets_them_as_they_are(
    chat_template: Templates,
):
    template = chat_template("plain")
    for shape, messages in SHAPES.items():
        text = template.render(messages, [], {})
        for message in messages:
            if message.role in ("system", "developer"):
                assert f"<|im_start|>system\n{message.content}<|im_end|>" in text, shape


@pytest.mark.parametrize("name", ["system_first", "one_system"])
def test_a_later_system_message_is_a_marked_part_of_the_question_after_it(
    chat_template: Templates, name: str
):
    text = chat_template(name).render([S, U, A, MID, said("user", "gox")], [], {})
    assert text.endswith(
        f"replyx<|im_end|>\n<|im_start|>user\n{MARKED}\n\ngox<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["system_first", "one_system"])
def test_a_later_system_message_without_a_question_is_a_turn_of_its_own(
    chat_template: Templates, name: str
):
    text = chat_template(name).render([S, U, MID], [], {})
    assert text.endswith(
        f"askx<|im_end|>\n<|im_start|>user\n{MARKED}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_later_system_message_after_a_result_is_a_part_of_it():
    # Another user turn would make templates drop the thoughts of the calls before.
    assert texts(mark_later(turns(U, calling(), result(), MID)))[-1] == (
        "tool",
        f"weather1x\n\n{MARKED}",
    )
    assert texts(mark_later(turns(U, calling(), result(), MID, A)))[2:] == [
        ("tool", f"weather1x\n\n{MARKED}"),
        ("assistant", "replyx"),
    ]


@pytest.mark.parametrize("repair", [mark_later, mark_between])
def test_a_system_message_between_a_call_and_its_result_is_a_part_of_the_result(repair):
    assert texts(repair(turns(U, calling(), MID, result())))[2:] == [
        ("tool", f"{MARKED}\n\nweather1x")
    ]


def test_a_later_system_message_joins_a_question_with_media_as_a_part():
    question = Message(role="user", content="askx", media=(Placement(0, MediaKind.IMAGE),))
    assert mark_later(turns(U, MID, question))[1:] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": f"{MARKED}\n\n"},
                {"type": "image"},
                {"type": "text", "text": "askx"},
            ],
        }
    ]


def test_marks_go_around_media_too():
    assert marked("system", [{"type": "image"}]) == [
        {"type": "text", "text": "<system>\n"},
        {"type": "image"},
        {"type": "text", "text": "\n</system>"},
    ]


def test_an_empty_later_system_message_is_nothing():
    assert texts(mark_later(turns(U, said("system", ""), A))) == [
        ("user", "askx"),
        ("assistant", "replyx"),
    ]


def test_the_first_messages_of_the_system_are_one_where_only_one_is_taken(
    chat_template: Templates,
):
    text = chat_template("one_system").render([S, DEVELOPER, U], [], {})
    assert "<|im_start|>system\nsystemx\n\ndeveloperx<|im_end|>\n<|im_start|>user\naskx" in text


def test_a_template_without_a_system_role_gets_it_in_the_first_question(chat_template: Templates):
    text = chat_template("gemma").render([S, DEVELOPER, U], [], {})
    assert "<start_of_turn>user\nsystemx\n\ndeveloperx\n\naskx<end_of_turn>" in text


def test_a_system_message_that_no_question_follows_is_the_question_there():
    assert texts(lead_with_user(turns(S, A))) == [("user", "systemx"), ("assistant", "replyx")]


def test_roles_alternate_where_they_must(chat_template: Templates):
    text = chat_template("gemma").render([U, said("user", "gox"), A, SILENT, MID], [], {})
    assert "<start_of_turn>user\naskx\n\ngox<end_of_turn>\n<start_of_turn>assistant\nreplyx" in text


def test_thoughts_of_merged_turns_are_merged_as_well():
    thoughtful = [said("assistant", text, reasoning_content=f"{text}!") for text in ("a", "b")]
    [_, merged] = merge_assistants(turns(U, *thoughtful))
    assert (merged["content"], merged["reasoning_content"]) == ("a\n\nb", "a!\n\nb!")


def test_turns_with_calls_are_not_merged():
    assert len(merge_assistants(turns(U, A, calling(), calling()))) == 4


def test_questions_with_media_are_merged_as_parts():
    picture = Message(role="user", media=(Placement(0, MediaKind.IMAGE),))
    assert merge_users(turns(U, picture)) == [
        {"role": "user", "content": [{"type": "text", "text": "askx\n\n"}, {"type": "image"}]}
    ]


def test_a_conversation_that_the_assistant_opens_gets_an_empty_question_before_it():
    assert texts(open_with_user(turns(S, A, U))) == [
        *(("system", "systemx"), ("user", ""), ("assistant", "replyx"), ("user", "askx")),
    ]


def test_results_are_acknowledged_where_a_question_may_not_follow_them():
    answered = texts(answer_results(turns(U, calling(), result(), U, A)))
    assert answered[3] == ("assistant", "Understood.")
    assert len(texts(answer_results(turns(U, A, calling(), result(), U)))) == 5


def test_the_result_of_a_function_is_that_of_a_tool():
    function, tool = turns(calling(), FUNCTION)[1], turns(calling(), result())[1]
    assert function == {**tool, "content": "functionx"}


def test_a_result_without_an_id_gets_that_of_the_call_it_answers():
    nameless = [said("tool", "b"), said("tool", "a")]
    ids = [turn.get("tool_call_id") for turn in turns(calling(count=2), *nameless, *nameless)]
    assert ids[1:3] == ["call00001", "call00002"]
    assert ids[3:] == [None, None]


def test_a_result_without_an_id_answers_the_call_of_its_name():
    other = said("tool", "b", name="other")
    assert "tool_call_id" not in turns(calling(), other)[1]


def test_a_result_without_a_call_is_shown_as_text(chat_template: Templates):
    text = chat_template("one_system").render([U, STRANGER], [], {})
    assert "<|im_start|>user\n<tool_result>\nstrangerx\n</tool_result><|im_end|>" in text


def test_a_result_of_an_unknown_call_joins_the_one_before_it():
    assert texts(strangers_as_text(turns(U, calling(), result(), STRANGER)))[2:] == [
        ("tool", "weather1x\n\n<tool_result>\nstrangerx\n</tool_result>")
    ]


IMAGE = {"type": "image"}


def text(content):
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("a", "b", "a\n\nb"),
        ("", "b", "b"),
        ("a", "", "a"),
        ("a", [], "a"),
        ("a", [IMAGE], [text("a\n\n"), IMAGE]),
        ([IMAGE], "b", [IMAGE, text("\n\nb")]),
        ([IMAGE, text("a")], [text("b"), IMAGE], [IMAGE, text("a\n\n"), text("b"), IMAGE]),
        ([text("a")], [IMAGE], [text("a\n\n"), IMAGE]),
        ([IMAGE], [text("b")], [IMAGE, text("\n\nb")]),
        ([IMAGE], [IMAGE], [IMAGE, IMAGE]),
    ],
)
def test_contents_are_joined_as_paragraphs(one, other, both):
    assert joined(one, other) == both


def jinja(source: str) -> ChatTemplate:
    from backend.model.text.jinja_renderer import JinjaSource, make_jinja_renderer

    return ChatTemplate(make_jinja_renderer(JinjaSource(source, source, "{}")), source)


def test_a_text_that_no_form_shows_is_an_error_that_names_its_message():
    template = jinja("{{ messages[-1].content }}")
    with pytest.raises(InvalidRequestError, match=r"^Messages: .*text of Messages\[0\]"):
        template.render([U, A, said("user", "gox")], [], {})


XML = (Path(__file__).parent.parent / "templates" / "xml.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", ['{"path": "a', '["a"]', "a"])
def test_a_call_that_was_cut_off_changes_nothing_of_what_is_before_it(arguments):
    cut = Message(role="assistant", tool_calls=(ToolCall("c1", "read", arguments),))
    before = [said("system", "S"), U]
    result = Message(role="tool", content="R", tool_call_id="c1")
    template = jinja(XML)
    start = template.render(before, [], {})
    text = template.render([*before, cut, result], [], {})
    assert text == f"{start}<function=read><parameter=arguments>{arguments}<|tool|>R<|assistant|>"


def test_a_template_that_demands_a_system_message_gets_an_empty_one():
    template = jinja(
        "{% if messages[0].role != 'system' %}{{ raise_exception('No system.') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert template.render([U, A], [], {}) == "system: \nuser: askx\nassistant: replyx\n"
    with pytest.raises(InvalidRequestError, match="No text"):
        jinja("{{ raise_exception('No text.') }}").render([U], [], {})


def test_a_text_that_the_template_changes_is_not_lost():
    template = jinja("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    assert template.render([S, U], [], {}) == "SYSTEMXASKX"
    template = jinja("{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    assert template.render([said("user", 'a "quote"\n')], [], {}) == r'"a \"quote\"\n"'


def test_what_an_assistant_said_may_be_dropped():
    template = jinja("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    assert template.render([U, A, said("user", "gox")], [], {}) == "askxgox"


def test_a_template_of_a_fixed_text_is_left_alone():
    assert jinja("Always the same.").render([S, U, A, MID], [], {}) == "Always the same."
