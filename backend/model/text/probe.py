"""Finds the abilities of a chat template by rendering small conversations.

A template's source can mislead; its output cannot.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from backend.core.prompt import EXAMPLE_CALL, EXAMPLE_TOOL, Message
from backend.model.text.prefix import common_length
from backend.model.text.renderer import (
    Renderer,
    RenderError,
    RenderTimeoutError,
    Schema,
    render,
    render_with_tools,
)
from backend.model.text.repairs import in_style, merge_turns, shorten_call_ids
from backend.model.text.shapes import Form, find_form
from backend.model.text.turns import CallStyle, to_turns

log = logging.getLogger(__name__)

_QUESTION = Message(role="user", content="q")
_CALL = EXAMPLE_CALL
_CALLING = (
    _QUESTION,
    Message(role="assistant", tool_calls=(_CALL,)),
    Message(role="tool", content="r", name=_CALL.name, tool_call_id=_CALL.call_id),
)
_OTHER_CALL = replace(_CALL, call_id="probe0002", arguments='{"probe_key": "probe_other"}')
_WHOLE = (
    _QUESTION,
    Message(role="assistant", content="probe_content", tool_calls=(_CALL, _OTHER_CALL)),
    Message(role="tool", content="probe_result", name=_CALL.name, tool_call_id="probe0001"),
    Message(role="tool", content="probe_rest", name=_CALL.name, tool_call_id="probe0002"),
)
_WHOLE_PARTS = ("probe_content", "probe_value", "probe_other", "probe_result", "probe_rest")
# Repairs that leave calls intact.
_HARMLESS = (merge_turns, shorten_call_ids)
_SCHEMA: Schema = EXAMPLE_TOOL.schema
# In order of preference: objects, for templates that iterate arguments; "", safe to concatenate.
_STYLES = tuple(CallStyle(as_text, empty) for as_text, empty in product((False, True), ("", None)))
# Signs of a call in the wrong style: Python's repr, quoted JSON, None.
_MISTAKES = ("'probe_key'", r"\"probe_key", "None")
_THOUGHT_MARKERS = (
    *("<think>", "</think>", "[THINK]", "◁think▷", "<seed:think>", "<|START_THINKING|>"),
    *("<|channel|>analysis", "<|channel>thought"),
)


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a chat template.

    Attributes:
        form: The form that it needs for conversations.
        supports_tools: Whether tools appear in its output.
        supports_thinking: Whether it writes thoughts, or switches them on and off.
        written_call: Its rendering of `EXAMPLE_CALL`, with any text after it; empty if it renders
            no calls.
    """

    form: Form = field(default_factory=Form)
    supports_tools: bool = False
    supports_thinking: bool = False
    written_call: str = ""


def probe(renderer: Renderer, text: str) -> Abilities:
    """Return the abilities of a template.

    Args:
        renderer: Its renderer.
        text: Its Jinja source, if any.
    """
    try:
        style = next((style for style in _STYLES if _writes_calls(renderer, style)), None)
        return Abilities(
            form=find_form(renderer, _whole_style(renderer, style)),
            written_call=_written_call(renderer, style) if style else "",
            supports_tools=_writes_tools(renderer),
            supports_thinking=any(marker in text for marker in _THOUGHT_MARKERS)
            or _switches_thinking(renderer),
        )
    except RenderTimeoutError as error:
        log.warning("%s", error)
        return Abilities()


def _whole_style(renderer: Renderer, style: CallStyle | None) -> CallStyle:
    """Return the closest style in which a template renders a whole conversation with calls.

    Args:
        renderer: Renderer of the template.
        style: The style that it takes for a call; `None` if it takes none.
    """
    if style is None:
        style = CallStyle()
        styles = [style, replace(style, calls_as_text=True), replace(style, results_as_text=True)]
    else:
        apart = replace(style, content_apart=True)
        styles = [style, apart, replace(style, one_call=True), replace(apart, one_call=True)]
    return next((whole for whole in styles if _keeps_all(renderer, whole)), styles[0])


def _keeps_all(renderer: Renderer, style: CallStyle) -> bool:
    text = _written(renderer, _WHOLE, style)
    return all(part in text for part in _WHOLE_PARTS)


def _written_call(renderer: Renderer, style: CallStyle) -> str:
    """Return the text that a call adds to the prompt before it."""
    prompt = _written(renderer, (_QUESTION,), style)
    text = _written(renderer, _CALLING[:2], style) or _written(renderer, _CALLING, style)
    start = common_length(prompt, text)
    # Do not cut inside a marker: prompt and call may begin with different ones.
    marker = max(text.rfind(begin, 0, start) for begin in "<[")
    return text[marker if marker > text.rfind(">", 0, start) else start :]


def _writes_calls(renderer: Renderer, style: CallStyle) -> bool:
    before = _written(renderer, (_QUESTION,), style)
    text = _written(renderer, _CALLING, style)
    is_mistaken = any(text.count(mistake) > before.count(mistake) for mistake in _MISTAKES)
    return "probe_value" in text and not is_mistaken


def _written(renderer: Renderer, messages: Sequence[Message], style: CallStyle) -> str:
    """Return a conversation as rendered, with tools if the template takes them; "" if it cannot."""
    turns = in_style(to_turns(messages, style), style)
    for schemas in ([_SCHEMA], None):
        with contextlib.suppress(RenderError):
            return render(renderer, turns, schemas, {}, repairs=_HARMLESS)
    return ""


def _writes_tools(renderer: Renderer) -> bool:
    try:
        turns = to_turns([_QUESTION], CallStyle())
        return render_with_tools(renderer, turns, [_SCHEMA], {}) is not None
    except RenderError:
        return False


def _switches_thinking(renderer: Renderer) -> bool:
    turns = to_turns([_QUESTION], CallStyle())
    try:
        texts = {render(renderer, turns, None, {"enable_thinking": on}) for on in (True, False)}
    except RenderError:
        return False
    return len(texts) > 1
