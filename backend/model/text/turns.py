"""Turns: messages in the form of chat templates, plain dicts of the OpenAI shape."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from backend.core.prompt import JsonValue, Message, ToolCall
from backend.errors import InvalidRequestError

Turn: TypeAlias = Mapping[str, JsonValue]

# Older and newer names of the same roles, which few templates know.
_ROLE_OF_TURN = {"developer": "system", "function": "tool"}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form that a template needs for an assistant message with tool calls.

    Attributes:
        arguments_as_text: Whether arguments are JSON text rather than an object.
        empty_content: The value for no content: some templates lose the calls on "".
        content_apart: Whether content next to calls must be a separate turn.
        one_call: Whether every call must be a separate turn.
        calls_as_text: Whether calls must be text.
        results_as_text: Whether results must be text too.
    """

    arguments_as_text: bool = False
    empty_content: str | None = ""
    content_apart: bool = False
    one_call: bool = False
    calls_as_text: bool = False
    results_as_text: bool = False


def check_roles(messages: Sequence[Message], template_text: str) -> None:
    """Refuse a role that is unknown both to chat templates in general and to this one.

    Raises:
        InvalidRequestError: The message names the message with that role.
    """
    for index, message in enumerate(messages):
        quoted = (f"'{message.role}'", f'"{message.role}"')
        if message.role not in _ROLES and not any(name in template_text for name in quoted):
            raise InvalidRequestError(
                f"Messages[{index}].role", f"{message.role!r} is not a role that this model knows"
            )


def to_turns(messages: Sequence[Message], style: CallStyle) -> list[Turn]:
    """Return the turns of messages; a turn has only the keys that its message sets.

    A result without an id gets that of the call that it answers.
    """
    return list(_linked([_turn(message, style) for message in messages]))


def calls_of(turn: Turn) -> Sequence[JsonValue]:
    """Return the calls of a turn."""
    calls = turn.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _turn(message: Message, style: CallStyle) -> Turn:
    turn: dict[str, JsonValue] = {
        "role": _ROLE_OF_TURN.get(message.role, message.role),
        "content": _parts(message) if message.media else message.content,
    }
    if message.tool_calls:
        turn["content"] = message.content or style.empty_content
        turn["tool_calls"] = [_call(call, style) for call in message.tool_calls]
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return turn | {key: value for key, value in optional.items() if value}


def _linked(turns: Sequence[Turn]) -> Iterator[Turn]:
    waiting: list[Mapping[str, JsonValue]] = []
    for turn in turns:
        if turn["role"] == "tool":
            call = _answered(turn, waiting)
            waiting = [each for each in waiting if each is not call]
            call_id = call.get("id") if call else None
            yield {"tool_call_id": call_id, **turn} if call_id else turn
        else:
            if turn["role"] != "system":
                waiting = [call for call in calls_of(turn) if isinstance(call, Mapping)]
            yield turn


def _answered(
    result: Turn, waiting: Sequence[Mapping[str, JsonValue]]
) -> Mapping[str, JsonValue] | None:
    """Return the call that a result answers: by its id, else its name, else the next."""
    if call_id := result.get("tool_call_id"):
        return next((call for call in waiting if call.get("id") == call_id), None)
    named = (call for call in waiting if _name(call) == result.get("name"))
    return next(named, waiting[0] if waiting and "name" not in result else None)


def _name(call: Mapping[str, JsonValue]) -> JsonValue:
    function = call.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _parts(message: Message) -> list[Turn]:
    """Return the content as text and media in order."""
    parts: list[Turn] = []
    start = 0
    for placement in message.media:
        parts += _text_parts(message.content[start : placement.offset])
        parts.append({"type": placement.kind.value})
        start = placement.offset
    return parts + _text_parts(message.content[start:])


def _text_parts(text: str) -> list[Turn]:
    return [{"type": "text", "text": text}] if text else []


def _call(call: ToolCall, style: CallStyle) -> Turn:
    arguments = call.arguments if call.arguments.strip() else "{}"
    function = {
        "name": call.name,
        "arguments": arguments if style.arguments_as_text else _object_or_text(arguments),
    }
    identity = {"id": call.call_id} if call.call_id else {}
    return {**identity, "type": "function", "function": function}


def _object_or_text(arguments: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
