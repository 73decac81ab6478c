"""`Messages` and `Metadata`: what the chat template is given."""

import json
from collections.abc import Mapping

from backend.config import MAX_MESSAGES, TuningOptions
from backend.core.prompt import JsonValue, Message, ToolCall
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.json_fields import (
    parse_json,
    require_array,
    require_name,
    require_object,
)
from backend.rpc.limits import require_at_most

KWARGS_KEY = "chat_template_kwargs"
THINKING_KEY = "enable_thinking"
PARALLEL_KEY = "parallel_tool_calls"
EFFORT_KEY = "reasoning_effort"

_TRUTHS = {"true": True, "false": False}


def messages(request: pb.PredictOptions) -> tuple[Message, ...]:
    """Return the conversation.

    Raises:
        InvalidRequestError: There are too many, one has no role, or its tool calls are malformed.
    """
    require_at_most("Messages", request.Messages, MAX_MESSAGES)
    return tuple(
        _message(f"Messages[{index}]", message) for index, message in enumerate(request.Messages)
    )


def template_options(metadata: Mapping[str, str], tuning: TuningOptions) -> Mapping[str, JsonValue]:
    """Return the variables of the template; a later source wins.

    The sources are the model's options, the blob `chat_template_kwargs`, and the keys
    `enable_thinking` and `reasoning_effort` of their own. Other metadata is the host's.

    Raises:
        InvalidRequestError: The blob is no JSON object, or a switch neither true nor false.
    """
    options: dict[str, JsonValue] = {}
    if tuning.enable_thinking is not None:
        options[THINKING_KEY] = tuning.enable_thinking
    if metadata.get(KWARGS_KEY, "").strip():
        options.update(_template_kwargs(metadata[KWARGS_KEY]))
    if metadata.get(THINKING_KEY):
        options[THINKING_KEY] = _truth(THINKING_KEY, metadata[THINKING_KEY])
    if metadata.get(EFFORT_KEY):
        options[EFFORT_KEY] = metadata[EFFORT_KEY]
    return options


def allows_parallel_calls(metadata: Mapping[str, str]) -> bool:
    """Return whether a reply may hold several calls, as OpenAI's `parallel_tool_calls` says.

    Raises:
        InvalidRequestError: It is neither true nor false.
    """
    value = metadata.get(PARALLEL_KEY)
    return _truth(PARALLEL_KEY, value) if value else True


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
    """Return arguments as JSON text, in which form most hosts send them already."""
    if value is None or value == "":
        return "{}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _template_kwargs(text: str) -> Mapping[str, JsonValue]:
    field = f'Metadata["{KWARGS_KEY}"]'
    return require_object(field, parse_json(field, text))


def _truth(key: str, text: str) -> bool:
    try:
        return _TRUTHS[text.strip().lower()]
    except KeyError:
        raise InvalidRequestError(
            f'Metadata["{key}"]', f"must be true or false, not {text!r}"
        ) from None
