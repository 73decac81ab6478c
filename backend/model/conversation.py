"""Messages as chat templates take them: plain dicts of the OpenAI shape."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from backend.core.prompt import JsonValue, Message, ToolCall
from backend.errors import InvalidRequestError

Turn: TypeAlias = Mapping[str, JsonValue]

CALL_ID_CHARS = 9

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template takes an assistant message that calls tools.

    Attributes:
        arguments_as_text: JSON text in place of an object.
        empty_content: What stands for no content: some templates lose the calls on "".
    """

    arguments_as_text: bool = False
    empty_content: str | None = ""


def check_roles(messages: Sequence[Message], template_text: str) -> None:
    """Refuse a role that neither chat templates in general nor this one knows.

    Raises:
        InvalidRequestError: Names the message.
    """
    for index, message in enumerate(messages):
        quoted = (f"'{message.role}'", f'"{message.role}"')
        if message.role not in _ROLES and not any(name in template_text for name in quoted):
            raise InvalidRequestError(
                f"Messages[{index}].role", f"{message.role!r} is no role that this model knows"
            )


def to_turns(messages: Sequence[Message], style: CallStyle) -> list[Turn]:
    """Return what a template iterates: a part that was not given is not there."""
    return [_turn(message, style) for message in messages]


def merge_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Join neighbours of one role that are nothing but text, as paragraphs."""
    merged: list[Turn] = []
    for turn in turns:
        if (
            merged
            and _is_text(turn)
            and _is_text(merged[-1])
            and turn["role"] == merged[-1]["role"]
        ):
            text = f"{merged[-1]['content']}{_PARAGRAPH}{turn['content']}"
            merged[-1] = {"role": turn["role"], "content": text}
        else:
            merged.append(turn)
    return merged


def shorten_call_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Give calls and their results ids of nine letters and digits: some templates insist."""
    return [_with_short_ids(turn) for turn in turns]


def _turn(message: Message, style: CallStyle) -> Turn:
    turn: dict[str, JsonValue] = {
        "role": "system" if message.role == "developer" else message.role,
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


def _is_text(turn: Turn) -> bool:
    content = turn["content"]
    return turn.keys() == {"role", "content"} and isinstance(content, str) and content != ""


def _with_short_ids(turn: Turn) -> Turn:
    short = dict(turn)
    if isinstance(call_id := turn.get("tool_call_id"), str):
        short["tool_call_id"] = _short_id(call_id)
    calls = turn.get("tool_calls")
    if isinstance(calls, list):
        short["tool_calls"] = [{**call, "id": _short_id(call.get("id", ""))} for call in calls]
    return short


def _short_id(call_id: str) -> str:
    if len(call_id) == CALL_ID_CHARS and call_id.isalnum():
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="replace"), digest_size=CALL_ID_CHARS)
    return digest.hexdigest()[:CALL_ID_CHARS]
