import json

import pytest

from backend.core.prompt import MediaKind
from backend.model.text.renderer import RenderError
from backend.model.text.template import ChatTemplate, find_snippets

IMAGE, AUDIO, VIDEO = MediaKind


def inline(turns, _tools, _options):
    written = {"image": "<|im|>", "audio": "<|au|>"}
    parts = turns[0]["content"]
    if isinstance(parts, str):
        return f"user: {parts}\nassistant:"
    text = "".join(part.get("text") or written.get(part["type"], "") for part in parts)
    return f"user: {text}\nassistant:"


def images_first(turns, _tools, _options):
    parts = turns[0]["content"]
    if isinstance(parts, str):
        return f"USER: {parts} ASSISTANT:"
    images = "<image>\n" * sum(part["type"] == "image" for part in parts)
    return f"USER: {images}{''.join(part.get('text', '') for part in parts)} ASSISTANT:"


def text_only(turns, _tools, _options):
    if not isinstance(turns[0]["content"], str):
        raise RenderError("can only concatenate str")
    return f"user: {turns[0]['content']}"


def writes_lists(turns, _tools, _options):
    return f"user: {turns[0]['content']}"


def writes_json(turns, _tools, _options):
    return f"user: {json.dumps(turns[0]['content'])}"


@pytest.mark.parametrize(
    ("renderer", "texts"),
    [
        (inline, {IMAGE: "<|im|>", AUDIO: "<|au|>"}),
        (images_first, {IMAGE: "<image>"}),
    ],
)
def test_what_a_template_writes_for_media_is_found(renderer, texts):
    found = find_snippets(ChatTemplate(renderer), {IMAGE: "<other>"})
    assert (found.texts, found.takes_parts) == (texts, True)


@pytest.mark.parametrize("renderer", [text_only, writes_lists, writes_json])
def test_a_template_that_knows_no_parts_gets_the_processors_own_tokens(renderer):
    found = find_snippets(ChatTemplate(renderer), {IMAGE: "<image>"})
    assert (found.texts, found.takes_parts) == ({IMAGE: "<image>"}, False)
