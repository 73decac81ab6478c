import json
from collections.abc import Callable, Mapping

import pytest
from tool_conversations import ANSWERED, QUESTION, TWO_CALLS, WEATHER

from backend.core.prompt import JsonValue, MediaKind, Message, ToolCall
from backend.errors import InvalidRequestError
from backend.formats.format import FormatEvidence
from backend.model.text.template import ChatTemplate, find_snippets
from backend.output.detection import detect

Templates = Callable[[str], ChatTemplate]

CALL = Message(
    role="assistant",
    tool_calls=(ToolCall(call_id="call_12345678", name="weather", arguments='{"city": "Oslo"}'),),
)
RESULT = Message(role="tool", content="sun", name="weather", tool_call_id="call_12345678")
CALLING = (QUESTION, CALL, RESULT)
WITH_TOOLS = ["llama3", "mistral", "xml", "hermes_tool_use", "one_call"]


def test_a_conversation_is_rendered_up_to_the_reply(chat_template: Templates):
    text = chat_template("plain").render([QUESTION], [], {})
    assert text == "<|im_start|>user\nIs it raining?<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_begins_even_after_an_assistant_message(chat_template: Templates):
    messages = [QUESTION, Message(role="assistant", content="It")]
    text = chat_template("plain").render(messages, [], {})
    assert text.endswith("It<|im_end|>\n<|im_start|>assistant\n")


def test_rendering_twice_gives_the_same_bytes(chat_template: Templates):
    template = chat_template("mistral")
    assert template.render(CALLING, [WEATHER], {}) == template.render(CALLING, [WEATHER], {})


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_are_in_the_text(chat_template: Templates, name: str):
    template = chat_template(name)
    assert template.supports_tools
    assert "Tell the weather" in template.render([QUESTION], [WEATHER], {})


def test_tools_that_need_a_system_message_get_an_empty_one(chat_template: Templates):
    text = chat_template("xml").render([QUESTION], [WEATHER], {})
    assert text.startswith("<|system|><tool>")


@pytest.mark.parametrize("name", ["plain", "deepseek", "gemma"])
def test_a_template_without_tools_refuses_them(chat_template: Templates, name: str):
    template = chat_template(name)
    assert not template.supports_tools
    with pytest.raises(InvalidRequestError, match=r"^Tools: .*does not support tools"):
        template.render([QUESTION], [WEATHER], {})


RULES = Message(role="system", content="Be short.")
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | default('') }}"
    "{% endfor %}<assistant>"
)


@pytest.mark.parametrize(
    ("condition", "messages", "shown"),
    [
        # As Mistral's older templates, at the end of a loop with a reminder.
        ("messages[-1].role != 'system'", [*CALLING, RULES], "</system>"),
        # As Granite 3's templates for speech.
        ("messages[0].role != 'system'", [RULES, QUESTION], "<user>Be short."),
    ],
)
def test_tools_that_a_system_message_hides_are_shown(
    condition: str, messages: list[Message], shown: str
):
    template = jinja(f"{{% if tools and {condition} %}}{{{{ tools }}}}{{% endif %}}{TURNS}")
    text = template.render(messages, [WEATHER], {})
    assert "Tell the weather" in text
    assert shown in text
    assert "<system>Be short." in template.render(messages, [], {})


def test_thoughts_are_left_out_where_the_template_refuses_them():
    template = jinja(
        "{% for m in messages if m.reasoning_content %}{{ raise_exception('no thoughts') }}"
        f"{{% endfor %}}{TURNS}"
    )
    messages = [
        QUESTION,
        Message(role="assistant", content="No.", reasoning_content="hm"),
        QUESTION,
    ]
    assert template.render(messages, [], {}).count("No.") == 1


def test_a_template_that_cuts_off_a_thought_finds_an_empty_one():
    # Like Hermes 4, which fails where an answer has none.
    template = jinja(
        "{% for m in messages %}<{{ m.role }}>{% if thinking and m.role == 'assistant' %}"
        "{{ '<think> </think>' + m.content.split('</think>', 1)[1] }}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    messages = [
        QUESTION,
        Message(role="assistant", content="No.", reasoning_content="hm"),
        QUESTION,
    ]
    text = template.render(messages, [], {"enable_thinking": True})
    assert text == "<user>Is it raining?<assistant><think> </think>No.<user>Is it raining?"
    assert "<think>" not in template.render(messages, [], {})


def test_tools_lost_in_this_conversation_alone_are_refused():
    template = jinja(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if tools and messages|length == 1 %}{{ tools | tojson }}{% endif %}"
    )
    assert template.supports_tools
    with pytest.raises(InvalidRequestError, match=r"^Tools: "):
        template.render([QUESTION, Message(role="assistant", content="a")], [WEATHER], {})


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
):
    text = chat_template(name).render(CALLING, [], {})
    assert written in text
    assert "None" not in text


def test_neighbours_are_merged_only_where_the_template_refuses_them(
    chat_template: Templates,
):
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


def test_a_refusal_comes_in_the_templates_own_words():
    template = jinja(
        "{% for m in messages %}{% if 'prose' in m.content %}"
        "{{ raise_exception('Only poems, please.') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match=r"^Messages: Only poems, please\.$"):
        template.render([Message(role="user", content="prose")], [], {})


def test_a_template_that_crashes_is_a_refusal_too():
    def crash(*_: object) -> str:
        from backend.model.text.renderer import RenderError

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
):
    template = jinja(
        "{{ 'unset' if enable_thinking is undefined else 'on' if enable_thinking else 'off' }}"
        "{{ ' ' + reasoning_effort if reasoning_effort is defined }}"
        "{{ ' ' + color[0] if color is defined }}"
    )
    assert template.supports_thinking
    assert template.render([QUESTION], [], options) == tail


def test_variables_that_a_template_demands_are_given_to_it():
    demanding = "Today is {{ datetime + '.' }} {{ functions + ' ' + messages[0].content }}"
    template = jinja(demanding)
    assert template.render([QUESTION], [], {"datetime": "Monday"}) == (
        "Today is Monday. [] Is it raining?"
    )
    assert '[{"name": "weather", ' in template.render([QUESTION], [WEATHER], {})
    asking = jinja("{{ functions | default('none') }} {{ datetime }}{{ messages[0].content }}")
    assert asking.render([QUESTION], [], {}) == "none Is it raining?"


def test_a_template_that_takes_no_tools_is_still_asked_how_it_writes_calls():
    template = jinja(
        "{% if tools %}{{ raise_exception('No tools.') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    )
    assert template.written_call.startswith('<tool_call>{"name": "probe_tool"')


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


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "add_generation_prompt", "self"]
)
def test_options_cannot_replace_the_request(chat_template: Templates, name: str):
    with pytest.raises(InvalidRequestError, match=f"^chat_template_kwargs: may not set '{name}'"):
        chat_template("plain").render([QUESTION], [], {name: "x"})


@pytest.mark.parametrize("options", [{"documents": 5}, {"mode": "loud"}])
def test_options_that_the_template_refuses_are_blamed(options: dict[str, JsonValue]):
    template = jinja(
        "{% if mode == 'loud' %}{{ raise_exception('no such mode') }}{% endif %}"
        "{% if messages[0].content == '' %}{{ raise_exception('empty') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    with pytest.raises(InvalidRequestError, match=r"^chat_template_kwargs: "):
        template.render([QUESTION], [], options)
    with pytest.raises(InvalidRequestError, match=r"^Messages: empty"):
        template.render([Message(role="user", content="")], [], {"other": 1})


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
    from jinja_here import jinja_here
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=source
    )
    return jinja_here(tokenizer)


CITIES = ("Oslo", "Rome")


def in_order(text: str, *parts: str) -> bool:
    """Whether each part is in a text once, after the one before it."""
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places) and all(text.count(p) == 1 for p in parts)


def test_a_template_that_iterates_absent_tools_gets_an_empty_list(chat_template: Templates):
    template = chat_template("hermes_tool_use")
    assert template.supports_tools
    assert "<tools>  </tools>" in template.render([QUESTION], [], {})
    assert "Tell the weather" in template.render([QUESTION], [WEATHER], {})


def test_a_template_of_one_call_a_turn_gets_each_call_with_its_result(chat_template: Templates):
    text = chat_template("one_call").render(TWO_CALLS, [WEATHER], {})
    assert in_order(text, "Let me look.", '"Oslo"', "rain in Oslo", '"Rome"', "sun in Rome")


def test_calls_stay_together_where_the_template_takes_them_so(chat_template: Templates):
    text = chat_template("xml").render(TWO_CALLS, [WEATHER], {})
    assert in_order(text, "Let me look.", ">Oslo", ">Rome", "sun in Rome", "rain in Oslo")


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("messages", [TWO_CALLS, ANSWERED], ids=["pending", "answered"])
def test_nothing_of_a_conversation_with_calls_is_lost(
    chat_template: Templates, name: str, messages: tuple[Message, ...]
):
    text = chat_template(name).render(messages, [WEATHER], {})
    said = ["Is it raining?", "Let me look.", "sun in Rome", "rain in Oslo"]
    said += ["Only in Oslo.", "Thank you."] if messages is ANSWERED else []
    assert [part for part in said if text.count(part) != 1] == []
    assert "Oslo" in text.replace("in Oslo", "")
    assert "Rome" in text.replace("in Rome", "")


@pytest.mark.parametrize("messages", [TWO_CALLS, ANSWERED], ids=["pending", "answered"])
def test_content_next_to_calls_is_marked_in_their_result_where_replies_must_alternate(
    chat_template: Templates, messages: tuple[Message, ...]
):
    text = chat_template("mistral").render(messages, [WEATHER], {})
    assert "[/INST][TOOL_CALLS][" in text
    result = json.dumps("<assistant>\nLet me look.\n</assistant>\n\nsun in Rome")
    assert f'[TOOL_RESULTS]{{"content": {result},' in text


def test_calls_are_written_as_text_for_a_template_that_knows_no_tools(chat_template: Templates):
    text = chat_template("gemma").render(ANSWERED, [], {})
    calls = [{"name": "weather", "arguments": {"city": city}} for city in CITIES]
    oslo, rome = map(json.dumps, calls)
    results = "<start_of_turn>user\nsun in Rome\n\nrain in Oslo<end_of_turn>"
    assert in_order(text, "Let me look.", oslo, rome, results, "Only in Oslo.")


def test_a_template_that_writes_the_first_call_only_gets_them_one_by_one():
    template = jinja(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}\n{% endfor %}"
    )
    text = template.render(TWO_CALLS, [], {})
    assert in_order(text, "Let me look.", '"Oslo"', "rain in Oslo", '"Rome"', "sun in Rome")


def test_a_template_that_writes_no_calls_gets_them_as_text():
    template = jinja("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    text = template.render(TWO_CALLS, [], {})
    assert in_order(text, "Let me look.", '"Oslo"', '"Rome"', "tool: sun in Rome", "rain in Oslo")


ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}{% if m.content[0].type != 'image' %} {% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% if part.type == 'image' %}<image>{% endif %}{% endfor %}\n{% endfor %}"
)


def test_results_have_the_role_in_which_a_template_shows_them():
    # Like GLM 4 of 2025, Granite 3.0 and OLMo 3.
    template = jinja(
        "{% for m in messages %}{% if m.role in ['user', 'assistant', 'observation'] %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}<assistant>"
    )
    text = template.render(ANSWERED, [], {})
    assert in_order(text, "<user>Is it", "<observation>sun in Rome", "<observation>rain in Oslo")
    again = template.render([*CALLING, QUESTION], [], {})
    assert "<observation>sun<user>" in again


def test_a_name_is_apart_from_its_call_where_a_template_shows_it_as_metadata():
    # Like GLM 4 of 2025.
    template = jinja(
        "{% for m in messages %}{% if m.role in ['user', 'assistant', 'observation'] %}"
        "<{{ m.role }}>{{ m.get('metadata', '') }}\n{{ m.content }}{% endif %}{% endfor %}"
    )
    text = template.render(ANSWERED, [], {})
    calls = '<assistant>weather\n{"city": "Oslo"}<assistant>weather\n{"city": "Rome"}'
    assert f"<assistant>\nLet me look.{calls}<observation>\nsun in Rome<observation>" in text
    ignoring = jinja(
        "{# metadata #}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    assert '"name": "weather"' in ignoring.render(ANSWERED, [], {})


def test_a_word_switches_thoughts_off_where_a_template_reads_no_variable_for_it():
    # Like Nemotron Nano 2.
    source = (
        "{% set ns = namespace(on=true) %}{% for m in messages %}<{{ m.role }}>"
        "{% if '/no_think' in m.content %}{% set ns.on = false %}{% endif %}"
        "{{ m.content.replace('/no_think', '').strip() }}{% endfor %}"
        "<assistant>{{ '<think>' if SWITCH else '<think></think>' }}"
    )
    off, rules = {"enable_thinking": False}, Message(role="system", content="Rules.")
    template = jinja(source.replace("SWITCH", "ns.on"))
    assert template.render([QUESTION], [], off).endswith("<assistant><think></think>")
    text = template.render([rules, QUESTION], [], off)
    assert text == "<system>Rules.<user>Is it raining?<assistant><think></think>"
    assert template.render([QUESTION], [], {}).endswith("<assistant><think>")
    for name in ("enable_thinking", "thinking"):
        by_variable = jinja(source.replace("SWITCH", f"{name} and ns.on"))
        text = by_variable.render([QUESTION], [], off)
        assert text == "<user>Is it raining?<assistant><think></think>"


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        # Like GLM 4 of 2024.
        (
            "{% set tools = m['tools'] %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}",
            "[weather]",
        ),
        # Like Phi 4 mini.
        ("{% if 'tools' in m %}{{ '[' + m['tools'] + ']' }}{% endif %}", '[[{"name": "weather", '),
    ],
)
def test_a_template_that_reads_tools_from_a_message_shows_them(shown, written):
    template = jinja(
        f"{{% for m in messages %}}<{{{{ m.role }}}}>{shown}{{{{ m.content }}}}{{% endfor %}}"
    )
    assert template.supports_tools
    assert f"<system>{written}" in template.render([QUESTION], [WEATHER], {})
    rules = Message(role="system", content="Rules.")
    text = template.render([rules, *ANSWERED], [WEATHER], {})
    assert in_order(text, f"<system>{written}", "Rules.", "<user>Is it")
    assert text.count("<system>") == 1
    assert written not in template.render([rules, QUESTION], [], {})


def test_a_template_that_iterates_over_parts_shows_every_text():
    text = jinja(ONLY_PARTS).render([Message(role="system", content="Rules."), *ANSWERED], [], {})
    parts = ("system Rules.", "user Is it raining?", "assistant Let me look.", '"Oslo"', '"Rome"')
    assert in_order(text, *parts, "sun in Rome", "rain in Oslo", "assistant Only in Oslo.", "Thank")


def test_a_template_that_iterates_over_parts_writes_media_without_the_texts_around_them():
    assert find_snippets(jinja(ONLY_PARTS), {}).texts == {MediaKind.IMAGE: "<image>"}


def test_a_template_that_iterates_over_parts_takes_a_turn_without_text():
    silent = [QUESTION, Message(role="assistant"), Message(role="user", content="")]
    text = jinja(ONLY_PARTS).render(silent, [], {})
    assert text == "user Is it raining?assistant user "


def test_a_refusal_quotes_the_words_on_the_conversation_as_it_came():
    template = jinja(
        "{% for m in messages %}{% if 'prose' in m.content %}"
        "{{ raise_exception('Not after ' ~ messages|length ~ '.') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    messages = [QUESTION, QUESTION, Message(role="user", content="prose")]
    with pytest.raises(InvalidRequestError, match=r"Not after 3\."):
        template.render(messages, [], {})


@pytest.mark.parametrize(
    ("name", "found"),
    [
        # Like the official templates of Llama 3.2, it names no marker.
        ("one_call", "llama3_json"),
        ("llama3", "llama3_json"),
        ("hermes_tool_use", "hermes_json"),
        ("mistral", "mistral"),
    ],
)
def test_the_call_that_a_template_writes_tells_the_format(
    chat_template: Templates, name: str, found: str
):
    written = chat_template(name).written_call
    assert detect(FormatEvidence((), "", written_call=written)).tools.name == found


@pytest.mark.parametrize("name", ["plain", "gemma"])
def test_a_template_that_writes_no_calls_tells_nothing(chat_template: Templates, name: str):
    assert chat_template(name).written_call == ""


def test_the_written_call_begins_with_its_whole_marker():
    template = jinja(
        "{% for m in messages %}{% if m.tool_calls %}<tool_call>"
        "{{ m.tool_calls[0].function | tojson }}</tool_call>{% endif %}{% endfor %}"
        "{% if messages[-1].role == 'user' %}<think>{% endif %}"
    )
    assert template.written_call.startswith("<tool_call>")
