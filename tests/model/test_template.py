from collections.abc import Callable, Mapping

import pytest

from backend.core.prompt import JsonValue, Message, Tool, ToolCall
from backend.errors import InvalidRequestError
from backend.model.template import ChatTemplate

Templates = Callable[[str], ChatTemplate]

WEATHER = Tool(
    name="weather",
    schema={
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)
QUESTION = Message(role="user", content="Is it raining?")
CALL = Message(
    role="assistant",
    tool_calls=(ToolCall(call_id="call_12345678", name="weather", arguments='{"city": "Oslo"}'),),
)
RESULT = Message(role="tool", content="sun", name="weather", tool_call_id="call_12345678")
CALLING = (QUESTION, CALL, RESULT)
WITH_TOOLS = ["llama3", "mistral", "xml"]


def test_a_conversation_is_rendered_up_to_the_reply(chat_template: Templates):
    text = chat_template("plain").render([QUESTION], [], {})
    assert text == "<|im_start|>user\nIs it raining?<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_begins_even_after_an_assistant_message(chat_template: Templates):
    messages = [QUESTION, Message(role="assistant", content="It")]
    text = chat_template("plain").render(messages, [], {})
    assert text.endswith("It<|im_end|>\n<|im_start|>assistant\n")


def test_rendering_twice_gives_the_same_bytes(chat_template: Templates):  # lesson 8
    template = chat_template("mistral")
    assert template.render(CALLING, [WEATHER], {}) == template.render(CALLING, [WEATHER], {})


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_are_in_the_text(chat_template: Templates, name: str):  # lesson 66
    template = chat_template(name)
    assert template.supports_tools
    assert "Tell the weather" in template.render([QUESTION], [WEATHER], {})


def test_tools_that_need_a_system_message_get_an_empty_one(chat_template: Templates):
    text = chat_template("xml").render([QUESTION], [WEATHER], {})
    assert text.startswith("<|system|><tool>")


@pytest.mark.parametrize("name", ["plain", "deepseek", "gemma"])
def test_a_template_without_tools_refuses_them(chat_template: Templates, name: str):  # lesson 66
    template = chat_template(name)
    assert not template.supports_tools
    with pytest.raises(InvalidRequestError, match=r"^Tools: .*does not support tools"):
        template.render([QUESTION], [WEATHER], {})


def test_tools_lost_in_this_conversation_alone_are_refused(chat_template: Templates):
    only_system = [Message(role="system", content="s")]
    with pytest.raises(InvalidRequestError, match=r"^Tools: "):
        chat_template("mistral").render(only_system, [WEATHER], {})


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("llama3", '"parameters": {"city": "Oslo"}'),
        ("mistral", '"arguments": {"city": "Oslo"}'),
        ("deepseek", '<｜call｜>weather\n{"city": "Oslo"}'),
        ("xml", "<function=weather><parameter=city>Oslo"),
    ],
)
def test_past_calls_are_written_as_each_template_takes_them(
    chat_template: Templates, name: str, written: str
):  # lessons 64, 65
    text = chat_template(name).render(CALLING, [], {})
    assert written in text
    assert "None" not in text


def test_neighbours_are_merged_only_where_the_template_refuses_them(
    chat_template: Templates,
):  # lesson 62
    messages = [QUESTION, Message(role="user", content="Well?")]
    assert "Is it raining?\n\nWell?" in chat_template("gemma").render(messages, [], {})
    assert "Is it raining?<|im_end|>" in chat_template("plain").render(messages, [], {})


def test_long_call_ids_are_shortened_only_where_the_template_refuses_them(
    chat_template: Templates,
):
    text = chat_template("mistral").render(CALLING, [], {})
    assert "call_12345678" not in text
    (written,) = {part.split('"')[0] for part in text.split('id": "')[1:]}
    assert len(written) == 9


def test_developer_and_system_messages_merge_where_they_must(chat_template: Templates):
    messages = [
        Message(role="system", content="Be brief."),
        Message(role="developer", content="Be kind."),
        QUESTION,
    ]
    assert "Be brief.\n\nBe kind." in chat_template("mistral").render(messages, [], {})


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("gemma", (Message(role="system", content="s"), QUESTION), "System role not supported"),
        ("mistral", (Message(role="assistant", content="a"),), "must alternate"),
        ("mistral", (QUESTION, Message(role="function", content="f")), "Only user, assistant"),
    ],
)
def test_a_refusal_comes_in_the_templates_own_words(
    chat_template: Templates, name: str, messages: tuple[Message, ...], words: str
):
    with pytest.raises(InvalidRequestError, match=f"^Messages: .*{words}"):
        chat_template(name).render(messages, [], {})


def test_a_template_that_crashes_is_a_refusal_too():
    def crash(*_: object) -> str:
        from backend.model.renderer import RenderError

        raise RenderError("the chat template failed: KeyError: 'x'")

    template = ChatTemplate(crash)
    assert not template.supports_tools
    with pytest.raises(InvalidRequestError, match="KeyError"):
        template.render([QUESTION], [], {})


@pytest.mark.parametrize(
    ("options", "tail"),
    [
        ({"enable_thinking": True}, "on"),
        ({"enable_thinking": False}, "off"),
        ({}, "unset"),
        ({"reasoning_effort": "high"}, "unset high"),
        ({"enable_thinking": False, "color": ["red"]}, "off red"),
    ],
)
def test_options_reach_the_template_and_unset_stays_undefined(
    options: Mapping[str, JsonValue], tail: str
):  # lesson 67
    template = jinja(
        "{{ 'unset' if enable_thinking is undefined else 'on' if enable_thinking else 'off' }}"
        "{{ ' ' + reasoning_effort if reasoning_effort is defined }}"
        "{{ ' ' + color[0] if color is defined }}"
    )
    assert template.supports_thinking
    assert template.render([QUESTION], [], options) == tail


def test_the_thinking_switch_reaches_templates_that_call_it_thinking(chat_template: Templates):
    template = chat_template("deepseek")
    assert template.supports_thinking
    assert template.render([QUESTION], [], {"enable_thinking": True}).endswith("<think>\n")
    assert template.render([QUESTION], [], {"enable_thinking": False}).endswith("<｜Assistant｜>")


@pytest.mark.parametrize("name", ["plain", "llama3", "mistral", "xml", "gemma"])
def test_a_template_without_thoughts_says_so(chat_template: Templates, name: str):
    assert not chat_template(name).supports_thinking


def test_a_thought_reaches_the_template_under_both_of_its_names():
    template = jinja("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    thoughtful = Message(role="assistant", content="a", reasoning_content="hm")
    assert template.render([thoughtful], [], {}) == "hm hm"


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_options_cannot_replace_the_request(chat_template: Templates, name: str):
    with pytest.raises(InvalidRequestError, match=f"^chat_template_kwargs: may not set '{name}'"):
        chat_template("plain").render([QUESTION], [], {name: "x"})


def test_no_messages_are_refused(chat_template: Templates):
    with pytest.raises(InvalidRequestError, match=r"^Messages: is empty"):
        chat_template("plain").render([], [], {})


def test_an_unknown_role_is_refused(chat_template: Templates):
    with pytest.raises(InvalidRequestError, match=r"^Messages\[0\]\.role"):
        chat_template("plain").render([Message(role="wizard")], [], {})


def test_a_model_without_a_template_says_so():
    template = ChatTemplate(None)
    assert (template.text, template.supports_tools, template.supports_thinking) == (
        "",
        False,
        False,
    )
    with pytest.raises(InvalidRequestError, match="no chat template"):
        template.render([QUESTION], [], {})


def jinja(source: str) -> ChatTemplate:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from backend.model.hf_renderer import make_jinja_renderer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=source
    )
    return ChatTemplate(make_jinja_renderer(tokenizer), source)
