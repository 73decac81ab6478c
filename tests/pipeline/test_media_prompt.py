"""Places of media in the text of a request, without a model."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from scripted_engine import ByteTokenizer, make_model
from vision import as_base64, picture

from backend.config import ModelOptions
from backend.core.prompt import (
    MediaKind,
    Medium,
    Message,
    Placement,
    PreparedMedium,
    Tool,
    ToolCall,
)
from backend.core.request import GenerationCall, GenerationParams
from backend.errors import InvalidRequestError
from backend.model.vision.media_processor import ProcessorError
from backend.pipeline import worker_pool
from backend.pipeline.rendering import WrittenPrompt, media_prompt, tokenize
from common.rpc import AbandonedError

PARAMS = GenerationParams(request_id="r")

IMAGE = MediaKind.IMAGE
PLACE = "<|see|>"
JOINER = "\u2060"


class NumberingProcessor:
    """Writes [n] for the n-th picture."""

    sampling_rate = 16_000

    def __init__(self, *, takes_parts=True):
        self.snippets = {IMAGE: PLACE}
        self.takes_parts = takes_parts
        self._numbers = {}

    def prepare(self, kind, _content, digest):
        number = self._numbers.setdefault(digest, len(self._numbers) + 1)
        text = f"[{number}]"
        return PreparedMedium(kind, digest, text, tuple(text.encode()), {})


class FailingProcessor(NumberingProcessor):
    def prepare(self, *_):
        raise ProcessorError("absolute aspect ratio must be smaller than 200")


class ForgetfulTokenizer(ByteTokenizer):
    """Has no token for a bracket."""

    def encode_prompt(self, text):
        return super().encode_prompt(text.replace("[", ""))


class PausingProcessor(NumberingProcessor):
    """Waits in the middle of its first picture."""

    def __init__(self):
        super().__init__()
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.prepared = 0

    def prepare(self, *given):
        self.began.set()
        self.goes_on.wait()
        self.prepared += 1
        return super().prepare(*given)


def model_with(processor):
    return replace(make_model(ModelOptions(model="org/tiny")), media=processor)


def seeing_model():
    return model_with(NumberingProcessor())


def call(count, prompt="", *messages):
    pictures = [as_base64(picture(n, (8, 8))) for n in range(count)]
    media = tuple(Medium(IMAGE, f"Images[{n}]", text) for n, text in enumerate(pictures))
    return GenerationCall(params=PARAMS, prompt=prompt, messages=messages, media=media)


def expanded(count, prompt):
    tokens = tokenized(count, prompt).token_ids
    return bytes(tokens).decode()


def tokenized(count, prompt, model=None):
    model = model or seeing_model()
    shown = media_prompt(call(count, prompt), model)
    return tokenize(WrittenPrompt(shown.prompt, is_raw=True), shown.media, model)


def user(text):
    return Message(role="user", content=text)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("a <__media__> b <__media__>!", "a [1] b [2]!"),
        ("a <__media__> b <__media__>", "a [1] b [2]\n"),
        (f"{PLACE}{PLACE} both", "[1][2] both"),
        ("both", "[1][2]both"),
    ],
)
def test_media_stand_where_a_raw_prompt_says(prompt, text):
    assert expanded(2, prompt) == text


@pytest.mark.parametrize("prompt", ["<__media__>", "<__media__> " * 3, PLACE])
def test_another_number_of_places_is_refused(prompt):
    with pytest.raises(InvalidRequestError, match=r"Prompt: has \d places for 2 media"):
        media_prompt(call(2, prompt), seeing_model())


def test_markers_in_messages_become_placements():
    shown = media_prompt(call(2, "", user("a<__media__>b"), user("<__media__>c")), seeing_model())
    assert [message.content for message in shown.messages] == ["ab", "c"]
    assert [message.media for message in shown.messages] == [
        (Placement(1, IMAGE),),
        (Placement(0, IMAGE),),
    ]


def test_a_spelled_placeholder_is_disarmed_and_placements_stay():
    shown = media_prompt(call(1, "", user(f"x{PLACE}y<__media__>z")), seeing_model())
    assert shown.messages[0].content == f"x<{JOINER}|see|>yz"
    assert shown.messages[0].media == (Placement(len(f"x<{JOINER}|see|>y"), IMAGE),)


def test_a_spelled_placeholder_is_disarmed_wherever_a_template_may_write_it():
    schema = {"type": "function", "function": {"name": "f", "description": f"draws {PLACE}"}}
    messages = [
        Message(
            role="assistant",
            name=PLACE,
            reasoning_content=PLACE,
            tool_calls=(
                ToolCall(call_id="1", name="f", arguments='{"a": ["\\u003c|see|>"]}'),
                ToolCall(call_id="2", name="f", arguments='{ "a":1}'),
                ToolCall(call_id="3", name="f", arguments=f"{{{PLACE}"),
            ),
        ),
        user("what?"),
    ]
    asked = replace(call(1, "", *messages), tools=(Tool(name="f", schema=schema),))
    shown = media_prompt(asked, seeing_model())
    safe = f"<{JOINER}|see|>"
    reply = shown.messages[0]
    assert (reply.name, reply.reasoning_content) == (safe, safe)
    assert json.loads(reply.tool_calls[0].arguments) == {"a": [safe]}
    assert reply.tool_calls[1].arguments == '{ "a":1}'
    assert reply.tool_calls[2].arguments == f"{{{safe}"
    (tool,) = shown.tools
    assert tool.schema["function"]["description"] == f"draws {safe}"
    assert schema["function"]["description"] == f"draws {PLACE}"


def test_a_placeholder_beside_a_marker_is_no_place():
    assert expanded(1, f"{PLACE} <__media__>.") == f"<{JOINER}|see|> [1]."
    assert expanded(1, "[1] <__media__>.") == f"[{JOINER}1] [1]."


def test_a_template_without_parts_gets_the_snippets_in_its_text():
    model = model_with(NumberingProcessor(takes_parts=False))
    shown = media_prompt(call(1, "", user("what?")), model)
    assert shown.messages[0] == user(f"{PLACE}what?")


def test_a_template_that_leaves_a_picture_out_is_named():
    model = seeing_model()
    shown = media_prompt(call(2, "", user("what?")), model)
    with pytest.raises(InvalidRequestError, match="a place for 1 of 2 media"):
        tokenize(WrittenPrompt(f"user: {PLACE} what?"), shown.media, model)


def test_a_branch_may_show_fewer_pictures():
    model = seeing_model()
    shown = media_prompt(call(2, "", user("what?")), model)
    written = WrittenPrompt(f"user: {PLACE}{PLACE} what?", [f"user: {PLACE} why?"])
    prompt = tokenize(written, shown.media, model)
    assert bytes(prompt.token_ids) == b"user: [1][2] what?"
    assert prompt.system_tokens == len("user: [1]")
    assert prompt.boundaries == (len("user: [1]"), len("user: [1][2]"))


def test_spans_are_found_in_the_tokens_in_order():
    spans = tokenized(2, "[1 <__media__> and <__media__>.").media
    assert [(span.start, span.stop) for span in spans] == [(3, 6), (11, 14)]
    first, second = ([*span.key_ids()] for span in spans)
    assert max(first + second) < 0
    assert len({*first, *second}) == 6


def test_tokens_without_their_medium_are_refused():
    model = replace(seeing_model(), tokenizer=ForgetfulTokenizer())
    with pytest.raises(InvalidRequestError, match="Images: the tokens of medium 0"):
        tokenized(1, "<__media__>.", model)


@pytest.mark.parametrize(
    ("model", "medium", "problem"),
    [
        (model_with(None), Medium(IMAGE, "Images[0]", "x"), "reads text only"),
        (
            seeing_model(),
            Medium(MediaKind.AUDIO, "Audios[0]", "x"),
            "takes no audio: it takes image",
        ),
        (
            model_with(FailingProcessor()),
            call(1).media[0],
            "the model's processor: absolute aspect",
        ),
    ],
)
def test_what_a_model_cannot_take_is_refused_by_its_field(model, medium, problem):
    request = GenerationCall(params=PARAMS, prompt="x", media=(medium,))
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        media_prompt(request, model)
    assert str(caught.value).startswith(medium.field)


async def test_pictures_that_nobody_waits_for_any_more_are_left():
    processor, ended = PausingProcessor(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work():
        try:
            with pytest.raises(AbandonedError):
                media_prompt(call(3), model_with(processor))
        finally:
            loop.call_soon_threadsafe(ended.set)

    task = asyncio.create_task(worker_pool.run(work, size_bytes=1, reads_media=True))
    await asyncio.to_thread(processor.began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    processor.goes_on.set()
    await ended.wait()
    assert processor.prepared == 1
