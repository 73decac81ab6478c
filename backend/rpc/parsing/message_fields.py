"""`Messages` and `Metadata`: the input of the chat template."""

import json
from collections.abc import Mapping

from backend.config import MAX_MESSAGES, RequestDefaults
from backend.core.prompt import JsonValue, Message, ToolCall
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.json_fields import (
    parse_json,
    require_array,
    require_name,
    require_object,
    require_truth,
)
from backend.rpc.parsing.limits import require_at_most

KWARGS_KEY = "chat_template_kwargs"
THINKING_KEY = "enable_thinking"
EFFORT_KEY = "reasoning_effort"
BUDGET_KEY = "thinking_budget"
_MAX_DIGITS = 9


def messages(request: pb.PredictOptions) -> tuple[Message, ...]:
    """Return the conversation.

    Raises:
        InvalidRequestError: There are too many, one has no role, or its tool calls are malformed.
    """
    require_at_most("Messages", request.Messages, MAX_MESSAGES)
    return tuple(
        _message(f"Messages[{index}]", message) for index, message in enumerate(request.Messages)
    )


def template_options(
    metadata: Mapping[str, str], defaults: RequestDefaults
) -> Mapping[str, JsonValue]:
    """Return the variables of the template; a later source wins.

    The sources are the model's options, the object `chat_template_kwargs`, and the keys
    `enable_thinking`, `reasoning_effort` and `thinking_budget`, which disables thinking with 0.
    Other metadata belongs to the host.

    Raises:
        InvalidRequestError: The object is not JSON, or a switch is neither true nor false.
    """
    options: dict[str, JsonValue] = {}
    if defaults.enable_thinking is not None:
        options[THINKING_KEY] = defaults.enable_thinking
    if metadata.get(KWARGS_KEY, "").strip():
        options.update(_template_kwargs(metadata[KWARGS_KEY]))
    if metadata.get(THINKING_KEY):
        options[THINKING_KEY] = require_truth(f'Metadata["{THINKING_KEY}"]', metadata[THINKING_KEY])
    if metadata.get(EFFORT_KEY):
        options[EFFORT_KEY] = metadata[EFFORT_KEY]
    budget = thinking_budget(metadata, defaults)
    if budget is not None:
        options[BUDGET_KEY] = budget
    if budget == 0:
        options[THINKING_KEY] = False
    return options


def thinking_budget(metadata: Mapping[str, str], defaults: RequestDefaults) -> int | None:
    """Return the maximum tokens of thought, from the request or the model's options.

    Raises:
        InvalidRequestError: It is negative, not a number, or has ten digits or more.
    """
    text = metadata.get(BUDGET_KEY, "").strip()
    if not text:
        return defaults.thinking_budget
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        problem = f"must be a number of tokens, 0 or more, not {text[:32]!r}"
        raise InvalidRequestError(f'Metadata["{BUDGET_KEY}"]', problem)
    return int(text)


def _message(field: str, message: pb.Message) -> Message:
    return Message(
        role=require_name(f"{field}.role", message.role),
        content=message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
        tool_calls=_tool_calls(f"{field}.tool_calls", message.tool_calls),
    )


def _tool_calls(field: str, text: str) -> tuple[ToolCall, ...]:
    calls = parse_json(field, text) if text.strip() else None
    if calls is None:
        return ()
    return tuple(
        _tool_call(f"{field}[{index}]", call)
        for index, call in enumerate(require_array(field, calls))
    )


def _tool_call(field: str, value: JsonValue) -> ToolCall:
    call = require_object(field, value)
    function = require_object(f"{field}.function", call.get("function", call))
    call_id = call.get("id")
    return ToolCall(
        call_id=call_id if isinstance(call_id, str) else "",
        name=require_name(f"{field}.function.name", function.get("name")),
        arguments=_arguments(function.get("arguments")),
    )


def _arguments(value: JsonValue) -> str:
    """Return arguments as JSON text, as most hosts send them already."""
    if value is None or value == "":
        return "{}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _template_kwargs(text: str) -> Mapping[str, JsonValue]:
    field = f'Metadata["{KWARGS_KEY}"]'
    return require_object(field, parse_json(field, text))
