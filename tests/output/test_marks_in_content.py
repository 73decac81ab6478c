"""Marks in content: in strings of JSON, in sentences, and those that really end it."""

import json

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_replies import FORMATS
from tool_replies import TOOLS as NOTES

from backend.core.step import FinishReason
from backend.output.reply import ReplySpec
from backend.output.text import JsonText

TOOLS = {"w": {"type": "object", "properties": {"content": {"type": "string"}}}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def played(tools, reasoning, text, **options):
    spec = ReplySpec(format=golden.named_format(tools, reasoning), tools=TOOLS, **options)
    whole = golden.play(spec, [text])
    one_by_one = golden.play(spec, text)
    assert (whole.content, whole.reasoning) == (one_by_one.content, one_by_one.reasoning)
    assert golden.named_calls(whole) == golden.named_calls(one_by_one)
    return whole


def strings_of(text):
    """Return the parts of a text that are in strings, as the tracker sees them."""
    tracker = JsonText()
    found = ""
    for char in text:
        was_in_string = tracker.is_in_string
        tracker.follow(char)
        found += char if was_in_string and tracker.is_in_string else ""
    return found


@given(st.lists(JSON, min_size=1, max_size=4) | st.dictionaries(st.text(), JSON, min_size=1))
def test_strings_of_json_are_found(value):
    text = json.dumps(value, ensure_ascii=False)
    found = strings_of(f"So: {text} ok")
    decoder = json.JSONDecoder()
    assert found == "".join(
        json.dumps(string, ensure_ascii=False)[1:-1] for string in strings_in(value)
    )
    assert decoder.decode(text) == value


def strings_in(value):
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from strings_in(item)
        case dict():
            for key, item in value.items():
                yield key
                yield from strings_in(item)


@pytest.mark.parametrize(
    "text",
    ['[see "x', '{a: "x', '{"a" "x', '["a\nb', '{"a": {"b"}, "c', '{,"x', '[1 "x', '}"x', '"x'],
)
def test_what_is_not_json_has_no_strings(text):
    tracker = JsonText()
    tracker.follow(text)
    assert not tracker.is_in_string


def test_json_may_follow_json():
    tracker = JsonText()
    tracker.follow('{"a": [1, {}], "b": "\\""}\n["x')
    assert tracker.is_in_string


def test_a_mark_in_a_string_is_data_in_a_free_reply():
    text = '{"note": "he wrote <mm:think> there", "b": 1}'
    assert played("minimax_m3", "mm_think", text).content == text
    text = (
        '{"a": "use <tool_call>w<arg_key>content</arg_key><arg_value>q</arg_value></tool_call> so"}'
    )
    reply = played("glm4", "think", f"<think>hm</think>\n{text}")
    assert (reply.content, reply.reasoning, reply.tool_calls) == (text, "hm", ())


def test_a_call_after_json_is_a_call():
    text = '{"a": "<think>"}\n<tool_call>{"name": "w", "arguments": {}}</tool_call>'
    reply = played("hermes_json", "think", text)
    assert reply.content == '{"a": "<think>"}\n'
    assert golden.named_calls(reply) == (("w", "{}"),)


LINES = (
    "- **A**: fast\n\n  It needs one call.",
    "1. **Look up** it\n\n   I start with **Oslo**:",
    "It is the ` key",
    "You wrote:\n\n> hi",
    "Run:\n\n    ls",
)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_glued_to_any_line_of_text_is_read_as_after_plain_text(name):
    row = FORMATS[name]
    spec = ReplySpec(
        format=golden.named_format(row.parser or name, row.reasoning),
        tools={tool.name: tool.schema["function"]["parameters"] for tool in NOTES},
        prompt_tail=row.prompt_tail,
    )
    call = row.two or row.one
    plain = golden.play(spec, "So." + call)
    for line in LINES:
        reply = golden.play(spec, line + call)
        assert golden.named_calls(reply) == golden.named_calls(plain), line
        assert reply.content == line + plain.content.removeprefix("So."), line


@pytest.mark.parametrize(
    ("tools", "reasoning", "text"),
    [
        ("hermes_json", "think", "The tag <think> opens it, and </think> closes it."),
        ("hermes_json", "think", "Hi.\n\n</think> closes a thought."),
        ("json_list", "hunyuan_answer", "An <answer> has an </answer> at its end."),
        ("cohere", "cohere_think", "Write <|START_RESPONSE|> and <|END_RESPONSE|> around it."),
        ("kimi_k3", "xtml_think", 'Ends with "<|close|>response<|sep|>" always'),
        ("gemma4", "gemma4_channel", "a <|channel>thought b<channel|> c"),
        ("seed_oss", "seed_think", "a <seed:cot_budget_reflect> b"),
        ("hermes_json", "apriel_steps", 'It ends with "[BEGIN FINAL RESPONSE]" there'),
    ],
)
def test_a_mark_in_a_sentence_is_text(tools, reasoning, text):
    reply = played(tools, reasoning, text)
    assert (reply.content, reply.reasoning) == (text, "")


def test_a_mark_alone_on_its_line_is_not_shown():
    assert played("json_list", "hunyuan_answer", "<answer>\nHi.\n</answer>").content == "Hi."
    assert played("hermes_json", "think", "Hi.\n </think>\n\nBye.").content == "Hi.\n \n\nBye."
    assert played("hermes_json", "think", "Hi.</think>\n").content == "Hi.\n"


FRAMED = {
    "cohere": ("cohere_think", "<|START_RESPONSE|>{}<|END_RESPONSE|>"),
    "json_list": ("hunyuan_answer", "<answer>\n{}\n</answer>"),
    "granite": ("granite_text", "<think>R</think><response>{}</response>"),
    "kimi_k3": (
        "xtml_think",
        "<|open|>response<|sep|>{}<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "inkling": ("inkling_thinking", "<|content_text|>{}<|end_message|>"),
    "solar_open": ("solar_think", "<|think|>R<|end|><|begin|>assistant<|content|>{}<|end|>"),
    "hermes_json": ("think", "<think>R</think>{}</think>\n"),
}


ANSWERS = [
    *("**b**", '"q"', "`c`", "```py\nx = 1\n```", "a 🎉", "as follows:", "x, y,", "“q”", "5 %"),
    *("$x$", "a -", "Hi.", "1", "_i_", "| a |", "- *x*", "{}"),
]


@pytest.mark.parametrize("name", FRAMED)
def test_the_end_of_an_answer_is_not_shown_whatever_the_answer_ends_with(name):
    reasoning, frame = FRAMED[name]
    for answer in ANSWERS:
        reply = played(name, reasoning, frame.format(answer))
        assert reply.content.rstrip("\n") == answer


@pytest.mark.parametrize(
    "name", [name for name in FRAMED if name not in ("solar_open", "hermes_json")]
)
@pytest.mark.parametrize("answer", ["> q", "Press the ` key", "```py\nx = 1", "So:\n\n    make"])
def test_the_end_of_an_answer_in_a_frame_is_not_shown_after_code_without_an_end(name, answer):
    reasoning, frame = FRAMED[name]
    assert played(name, reasoning, frame.format(answer)).content == answer


def test_a_mark_inside_the_code_of_an_answer_in_a_frame_is_text():
    code = "So:\n\n```\nend with <|END_RESPONSE|>, or\n<|END_RESPONSE|> alone\n```\nBye `</x>`"
    frame = "<|START_RESPONSE|>{}<|END_RESPONSE|>"
    assert played("cohere", "cohere_think", frame.format(code)).content == code


def test_a_space_before_the_end_of_an_answer_is_kept():
    text = "<|START_RESPONSE|>So be it. <|END_RESPONSE|>"
    assert played("cohere", "cohere_think", text).content == "So be it. "
    unframed = "The mark is <|END_RESPONSE|>"
    assert played("cohere", "cohere_think", unframed).content == unframed


def test_a_thought_may_follow_a_call_or_a_frame():
    call = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'
    reply = played("hermes_json", "think", f"So.\n{call}\n<think>hm</think>\nOk.")
    assert (reply.content, reply.reasoning) == ("So.\nOk.", "hm")
    text = "So.<|end_message|><|message_model|><|content_thinking|>hm<|end_message|>"
    reply = played("inkling", "inkling_thinking", text)
    assert (reply.content, reply.reasoning) == ("So.", "hm")


def test_a_mark_before_a_call_is_not_shown():
    text = 'So. <|END_RESPONSE|> <|START_ACTION|>[{"tool_name": "w", "parameters": {}}]'
    reply = played("cohere", "cohere_think", text)
    assert reply.content == "So.  "
    assert reply.finish.reason is FinishReason.TOOL_CALLS
    text = "So. <|END_RESPONSE|> <|START_ACTION|> are two tokens."
    assert played("cohere", "cohere_think", text).content == text


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_another_tool_is_shown_with_its_opener(name):
    family = FORMATS[name]
    tools = golden.tool_format(family.parser or name)
    for lead in ("", "Ok.\n", "Ok: "):
        text = lead + family.one.replace("note_add", "rm_all")
        reply = played(tools.name, "none", text)
        assert not reply.tool_calls, text
        # A last marker alone on its line is dropped.
        ends = ("", tools.closer)
        assert tools.owns_reply or reply.content in [text.removesuffix(end) for end in ends]


QUOTABLE = [
    name
    for name, reply in FORMATS.items()
    if (tools := golden.tool_format(reply.parser or name)).is_quotable
    # Without a mark before the first call, nothing tells that it is quoted.
    and not (tools.owns_reply or tools.names_lead_json)
]


@pytest.mark.parametrize("name", QUOTABLE)
def test_all_marks_of_a_quoted_call_are_content(name):
    reply = FORMATS[name]
    spec = ReplySpec(
        format=golden.named_format(reply.parser or name, reply.reasoning),
        tools={tool.name: tool.parameters for tool in NOTES},
        prompt_tail=reply.prompt_tail,
    )
    for call in filter(None, (reply.one, reply.two)):
        quoted = "\n".join(f"> {line}" for line in call.split("\n"))
        texts = [f"As quoted:\n\n{quoted}\n\nOk?"]
        if "`" not in call:
            texts.append("So `{}` is it.".format(call.replace("\n", " ")))
        for text in texts:
            for chunks in ([text], text):
                played = golden.play(spec, chunks)
                assert (played.content, played.tool_calls) == (text, ())
