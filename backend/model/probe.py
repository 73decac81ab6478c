"""Find out what a chat template can do, by giving it small conversations.

What a template's source says about itself misleads; what it writes does not.
"""

import logging
from dataclasses import dataclass, field
from itertools import product

from backend.core.prompt import Message, ToolCall
from backend.model.conversation import CallStyle, to_turns
from backend.model.renderer import (
    Renderer,
    RenderError,
    RenderTimeoutError,
    Schema,
    render,
    render_with_tools,
)

log = logging.getLogger(__name__)

_QUESTION = Message(role="user", content="q")
_CALL = ToolCall(call_id="probe0001", name="probe_tool", arguments='{"probe_key": "probe_value"}')
_CALLING = (
    _QUESTION,
    Message(role="assistant", tool_calls=(_CALL,)),
    Message(role="tool", content="r", name=_CALL.name, tool_call_id=_CALL.call_id),
)
_SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": _CALL.name,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
# Preferred first: objects, for templates that iterate arguments; "", which is safe to concatenate.
_STYLES = tuple(CallStyle(as_text, empty) for as_text, empty in product((False, True), ("", None)))
# What a template makes of a call that it takes in another style: Python's repr, quoted JSON, None.
_MISTAKES = ("'probe_key'", r"\"probe_key", "None")
_THOUGHT_MARKERS = (
    *("<think>", "</think>", "[THINK]", "◁think▷", "<seed:think>", "<|START_THINKING|>"),
    *("<|channel|>analysis", "<|channel>thought"),
)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a chat template can do.

    Attributes:
        call_style: How it takes past calls.
        supports_tools: Whether tools appear in what it writes.
        supports_thinking: Whether it writes thoughts, or switches them on and off.
    """

    call_style: CallStyle = field(default_factory=CallStyle)
    supports_tools: bool = False
    supports_thinking: bool = False


def probe(renderer: Renderer, text: str) -> Abilities:
    """Return the abilities of a template.

    Args:
        renderer: Its renderer.
        text: Its Jinja source, if any.
    """
    try:
        style = next((style for style in _STYLES if _writes_calls(renderer, style)), CallStyle())
        return Abilities(
            call_style=style,
            supports_tools=_writes_tools(renderer),
            supports_thinking=any(marker in text for marker in _THOUGHT_MARKERS)
            or _switches_thinking(renderer),
        )
    except RenderTimeoutError as error:
        log.warning("%s", error)
        return Abilities()


def _writes_calls(renderer: Renderer, style: CallStyle) -> bool:
    try:
        before = render(renderer, to_turns([_QUESTION], style), [_SCHEMA], {})
        text = render(renderer, to_turns(_CALLING, style), [_SCHEMA], {})
    except RenderError:
        return False
    is_mistaken = any(text.count(mistake) > before.count(mistake) for mistake in _MISTAKES)
    return "probe_value" in text and not is_mistaken


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
