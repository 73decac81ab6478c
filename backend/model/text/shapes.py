"""Finds the repairs that a chat template needs, by rendering conversations of many shapes.

A template refuses a shape, loses a text of it, or moves one to another place: the last two in
silence. A repair is needed where it makes more shapes right than without it.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.core.prompt import EXAMPLE_CALL, EXAMPLE_TOOL, Message
from backend.model.text import conversation
from backend.model.text.conversation import AFTER_CALLS, BEFORE_CALLS
from backend.model.text.renderer import Renderer, RenderError, Schema, render
from backend.model.text.repairs import in_style
from backend.model.text.turns import CallStyle, Turn, to_turns

log = logging.getLogger(__name__)

_Shape = Sequence[Message]


def _said(role: str, text: str) -> Message:
    return Message(role=role, content=f"probe_{text}")


_S, _S2 = _said("system", "first"), _said("system", "second")
_M, _M2 = _said("system", "later"), _said("system", "latest")
_U, _U2, _U3 = (_said("user", text) for text in ("question", "request", "more"))
_A, _A2 = _said("assistant", "answer"), _said("assistant", "reply")
_SILENT = Message(role="assistant")
_CALL = Message(role="assistant", tool_calls=(EXAMPLE_CALL,))
_RESULT = Message(
    role="tool",
    content="probe_result",
    name=EXAMPLE_CALL.name,
    tool_call_id=EXAMPLE_CALL.call_id,
)
_STRANGER = Message(role="tool", content="probe_strange", tool_call_id="probe0009")
_NAMELESS = Message(role="tool", content="probe_strange")

# In the order in which they are tried; the shapes of one need no repair that follows it.
_SHAPES: Mapping[str, Sequence[_Shape]] = {
    "lead_with_user": ((_S, _U), (_S, _U, _A, _U2)),
    "merge_users": ((_U, _U2), (_U, _A, _U2, _U3), (_U, _U2, _A, _U3)),
    "merge_assistants": ((_U, _A, _A2, _U2), (_U, _A, _A2)),
    "open_with_user": ((_A, _U), (_S, _A, _U), (_CALL, _RESULT, _U)),
    "merge_leading": ((_S, _S2, _U), (_S, _S2, _U, _A, _U2), (_S, _S2, _M, _U)),
    "mark_later": (
        *((_S, _U, _M, _U2), (_U, _M, _U2), (_S, _U, _A, _M, _U2), (_S, _U, _A, _M, _M2, _U2)),
        *((_S, _U, _M, _A, _U2), (_S, _U, _M), (_U, _A, _M), (_S, _U, _A, _U2, _M)),
        *((_U, _M, _A, _M2, _U2), (_S, _U, _CALL, _RESULT, _M), (_U, _CALL, _RESULT, _M, _U2)),
        *((_S, _U, _CALL, _RESULT, _M, _A, _U2),),
    ),
    "mark_between": ((_U, _CALL, _M, _RESULT), (_U, _CALL, _M, _RESULT, _A, _U2)),
    "drop_silent": ((_U, _SILENT, _U2), (_U, _SILENT), (_U, _CALL, _RESULT, _SILENT, _U2)),
    "answer_results": ((_U, _CALL, _RESULT, _U2), (_U, _CALL, _RESULT, _U2, _A)),
    "orphans_as_text": (
        *((_U, _STRANGER), (_U, _NAMELESS), (_U, _A, _STRANGER, _U2), (_STRANGER, _U)),
    ),
    "strangers_as_text": (
        *((_U, _CALL, _RESULT, _STRANGER), (_U, _CALL, _RESULT, _STRANGER, _A, _U2)),
    ),
}
# Repairs not tried within this time are tried on the requests that need them.
FORM_BUDGET_S = 3.0
_VALUE = "probe_value"
_SCHEMAS: Sequence[Schema] = (EXAMPLE_TOOL.schema,)


@dataclass(frozen=True, slots=True)
class Form:
    """The form that a template needs for all conversations.

    Attributes:
        calls: The form of calls.
        repairs: Names of the repairs that it needs.
        shows_text: Whether its output contains what is said at all; a fixed text may not.
    """

    calls: CallStyle = field(default_factory=CallStyle)
    repairs: tuple[str, ...] = ()
    shows_text: bool = True

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "Form":
        """Return the form that JSON made of `dataclasses.asdict` describes."""
        return cls(CallStyle(**value["calls"]), tuple(value["repairs"]), value["shows_text"])

    def of(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Return a conversation in this form."""
        turns = conversation.apply(BEFORE_CALLS, self.repairs, turns)
        turns = in_style(turns, self.calls)
        return conversation.apply(AFTER_CALLS, self.repairs, turns)


def find_form(renderer: Renderer, calls: CallStyle) -> Form:
    """Return the form that a template needs.

    Args:
        renderer: Its renderer.
        calls: The form that it needs for calls.

    Raises:
        RenderTimeoutError: It takes too long.
    """
    found = Form(calls)
    if not any(_right(renderer, found, ((_U,), (_S, _U)))):
        return Form(calls, shows_text=False)
    deadline = time.monotonic() + FORM_BUDGET_S
    for name, shapes in _SHAPES.items():
        if time.monotonic() > deadline:
            log.warning("the chat template is too slow to try it on all shapes of conversations")
            break
        before = _right(renderer, found, shapes)
        if all(before):
            continue
        repaired = Form(calls, (*found.repairs, name))
        if sum(_right(renderer, repaired, shapes)) > sum(before):
            found = repaired
    return found


def _right(renderer: Renderer, form: Form, shapes: Iterable[_Shape]) -> list[bool]:
    """Return whether each shape is rendered with all its texts in place, without and with tools."""
    return [
        _is_shown(renderer, form, shape, tools) for shape in shapes for tools in (None, _SCHEMAS)
    ]


def _is_shown(
    renderer: Renderer, form: Form, shape: _Shape, tools: Sequence[Schema] | None = None
) -> bool:
    text = _rendered(renderer, form, shape, tools)
    start = conversation.leading([{"role": message.role} for message in shape])
    # Some templates move the first system turn to the last question.
    places = [text.find(message.content) for message in shape[start:] if message.content]
    leading = [message.content in text for message in shape[:start]]
    calls = [_VALUE in text for message in shape if message.tool_calls]
    return all((*leading, *calls)) and -1 not in places and places == sorted(places)


def _rendered(renderer: Renderer, form: Form, shape: _Shape, tools: Sequence[Schema] | None) -> str:
    """Return a conversation as rendered, or "" if the template refuses it."""
    try:
        return render(renderer, form.of(to_turns(shape, form.calls)), tools, {}, repairs=())
    except RenderError:
        return ""
