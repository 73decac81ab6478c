"""Finds the abilities of a chat template by rendering small conversations.

A template's source can mislead; its output cannot.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from msgspec import structs

from backend.core.prompt import EXAMPLE_CALL, EXAMPLE_TOOL, Message
from backend.model.text import conversation
from backend.model.text.conversation import (
    AFTER_CALLS,
    BEFORE_CALLS,
    CallStyle,
    Turn,
    in_style,
    in_words,
    merge_turns,
    shorten_call_ids,
    to_turns,
)
from backend.model.text.prefix import common_length
from backend.model.text.renderer import (
    Renderer,
    RenderError,
    RenderTimeoutError,
    Schema,
    render,
    render_with_tools,
)

log = logging.getLogger(__name__)

_Shape = Sequence[Message]


def _said(role: str, text: str) -> Message:
    return Message(role=role, content=f"probe_{text}")


_S, _S2 = _said("system", "first"), _said("system", "second")
_M, _M2 = _said("system", "later"), _said("system", "latest")
_U, _U2, _U3 = (_said("user", text) for text in ("question", "request", "more"))
_A, _A2 = _said("assistant", "answer"), _said("assistant", "reply")
_SILENT = Message(role="assistant")
_CALLING = Message(role="assistant", tool_calls=(EXAMPLE_CALL,))
_RESULT = Message(
    role="tool",
    content="probe_result",
    name=EXAMPLE_CALL.name,
    tool_call_id=EXAMPLE_CALL.call_id,
)
# Any order of a remark and its result is right.
_REMARK = structs.replace(_CALLING, content=_RESULT.content, reasoning_content="probe_thought")
_STRANGER = Message(role="tool", content="probe_strange", tool_call_id="probe0009")
_NAMELESS = Message(role="tool", content="probe_strange")

# In the order in which they are tried; the shapes of one need no repair that follows it.
_SHAPES: Mapping[str, Sequence[_Shape]] = {
    "lead_with_user": ((_S, _U), (_S, _U, _A, _U2), (_S, _U, _A, _U2, _CALLING, _RESULT)),
    "merge_users": ((_U, _U2), (_U, _A, _U2, _U3), (_U, _U2, _A, _U3)),
    "merge_assistants": ((_U, _A, _A2, _U2), (_U, _A, _A2)),
    "open_with_user": ((_A, _U), (_S, _A, _U), (_CALLING, _RESULT, _U)),
    "merge_leading": ((_S, _S2, _U), (_S, _S2, _U, _A, _U2), (_S, _S2, _M, _U)),
    "mark_later": (
        *((_S, _U, _M, _U2), (_U, _M, _U2), (_S, _U, _A, _M, _U2), (_S, _U, _A, _M, _M2, _U2)),
        *((_S, _U, _M, _A, _U2), (_S, _U, _M), (_U, _A, _M), (_S, _U, _A, _U2, _M)),
        *(
            (_U, _M, _A, _M2, _U2),
            (_S, _U, _CALLING, _RESULT, _M),
            (_U, _CALLING, _RESULT, _M, _U2),
        ),
        *((_S, _U, _CALLING, _RESULT, _M, _A, _U2),),
    ),
    "mark_between": ((_U, _CALLING, _M, _RESULT), (_U, _CALLING, _M, _RESULT, _A, _U2)),
    "remarks_in_results": (
        *((_U, _REMARK, _RESULT, _A), (_U, _REMARK, _RESULT, _REMARK, _RESULT)),
    ),
    "drop_silent": ((_U, _SILENT, _U2), (_U, _SILENT), (_U, _CALLING, _RESULT, _SILENT, _U2)),
    "answer_results": ((_U, _CALLING, _RESULT, _U2), (_U, _CALLING, _RESULT, _U2, _A)),
    "orphans_as_text": (
        *((_U, _STRANGER), (_U, _NAMELESS), (_U, _A, _STRANGER, _U2), (_STRANGER, _U)),
    ),
    "strangers_as_text": (
        *((_U, _CALLING, _RESULT, _STRANGER), (_U, _CALLING, _RESULT, _STRANGER, _A, _U2)),
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
        shows_text: Whether its output contains the messages' texts at all; a fixed text may not.
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
        turns = conversation.apply(AFTER_CALLS, self.repairs, turns)
        return in_words(turns, self.calls)


def find_form(renderer: Renderer, calls: CallStyle) -> Form:
    """Return the form that a template needs.

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


_QUESTION = Message(role="user", content="q")
_CALL = EXAMPLE_CALL
_CALLING_TURNS = (
    _QUESTION,
    Message(role="assistant", tool_calls=(_CALL,)),
    Message(role="tool", content="r", name=_CALL.name, tool_call_id=_CALL.call_id),
)
_OTHER_CALL = structs.replace(_CALL, call_id="probe0002", arguments='{"probe_key": "probe_other"}')
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
_PARTS = CallStyle(text_as_parts=True)
# Of results, in templates that write no calls and show no results as those of tools.
_RESULT_ROLES = ("observation", "environment", "tool_response", "tool_results", "function")
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
    """Return the abilities of a template, given its Jinja source, if any."""
    try:
        base = _PARTS if _takes_only_parts(renderer) else CallStyle()
        others = list(_other_styles(text))
        styles = (replace(style, text_as_parts=base.text_as_parts) for style in _STYLES)
        style = next((style for style in styles if _writes_calls(renderer, style)), None)
        return Abilities(
            form=find_form(renderer, _whole_style(renderer, style, base, others)),
            written_call=_written_call(renderer, style) if style else "",
            supports_tools=_writes_tools(renderer),
            supports_thinking=any(marker in text for marker in _THOUGHT_MARKERS)
            or _switches_thinking(renderer),
        )
    except RenderTimeoutError as error:
        log.warning("%s", error)
        return Abilities()


def _takes_only_parts(renderer: Renderer) -> bool:
    """Tell whether a template shows a text as a list of parts, and loses it as a string."""
    return not any(_right(renderer, Form(), ((_U,),))) and any(
        _right(renderer, Form(_PARTS), ((_U,),))
    )


def _whole_style(
    renderer: Renderer,
    style: CallStyle | None,
    base: CallStyle,
    others: Iterable[Mapping[str, Any]],
) -> CallStyle:
    """Return the closest style in which a template renders a whole conversation with calls.

    Args:
        style: The style that it takes for a call; `None` if it takes none.
        base: The style in its stead.
        others: Fields of the styles to try in that case.
    """
    if style is None:
        texts = [replace(base, **other) for other in others]
        styles = [base, *texts, replace(base, results_as_text=True)]
    else:
        apart = replace(style, content_apart=True)
        styles = [style, apart, replace(style, one_call=True), replace(apart, one_call=True)]
    return next((whole for whole in styles if _keeps_all(renderer, whole)), styles[0])


def _other_styles(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of styles to try where a template, given its source, writes no calls."""
    if "metadata" in text:
        yield {"names_apart": True, "result_role": _RESULT_ROLES[0]}
    yield {"calls_as_text": True}
    for role in _RESULT_ROLES:
        if f"'{role}'" in text or f'"{role}"' in text:
            yield {"calls_as_text": True, "result_role": role}


def _keeps_all(renderer: Renderer, style: CallStyle) -> bool:
    text = _written(renderer, _WHOLE, style)
    if style.names_apart:
        plain = _written(renderer, (_QUESTION,), style)
        calls = sum(len(message.tool_calls) for message in _WHOLE)
        if text.count(_CALL.name) < plain.count(_CALL.name) + calls:
            return False
    return all(part in text for part in _WHOLE_PARTS)


def _written_call(renderer: Renderer, style: CallStyle) -> str:
    """Return the text that a call adds to the prompt before it."""
    prompt = _written(renderer, (_QUESTION,), style)
    text = _written(renderer, _CALLING_TURNS[:2], style) or _written(
        renderer, _CALLING_TURNS, style
    )
    start = common_length(prompt, text)
    # Do not cut inside a marker: prompt and call may begin with different ones.
    marker = max(text.rfind(begin, 0, start) for begin in "<[")
    return text[marker if marker > text.rfind(">", 0, start) else start :]


def _writes_calls(renderer: Renderer, style: CallStyle) -> bool:
    before = _written(renderer, (_QUESTION,), style)
    text = _written(renderer, _CALLING_TURNS, style)
    is_mistaken = any(text.count(mistake) > before.count(mistake) for mistake in _MISTAKES)
    return "probe_value" in text and not is_mistaken


def _written(renderer: Renderer, messages: Sequence[Message], style: CallStyle) -> str:
    """Return a conversation as rendered, with tools if the template takes them; "" if it cannot."""
    turns = in_words(in_style(to_turns(messages, style), style), style)
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
