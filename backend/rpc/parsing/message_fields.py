"""`Messages` and `Metadata`: the input of the chat template."""

import json
from collections.abc import Mapping

from backend.config import MAX_MESSAGES, MediaLimits, RequestDefaults
from backend.core.media import MediaKind, Medium
from backend.core.prompt import JsonValue, Message, ToolCall
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.json_fields import (
    parse_json,
    require_array,
    require_name,
    require_object,
    truth,
)
from backend.rpc.parsing.limits import require_at_most


def media(request: pb.PredictOptions, limits: MediaLimits) -> tuple[Medium, ...]:
    """Return the audios, images and videos of a request, each kind in its own order.

    The kinds come in the order in which the host's template puts their markers.

    Raises:
        InvalidRequestError: One is empty or too long, or there are more than the limits allow.
    """
    given = (
        ("Audios", MediaKind.AUDIO, request.Audios, limits.audios),
        ("Images", MediaKind.IMAGE, request.Images, limits.images),
        ("Videos", MediaKind.VIDEO, request.Videos, limits.videos),
    )
    for field, _, payloads, limit in given:
        if len(payloads) > limit:
            problem = f"holds {len(payloads)}, at most {limit} per request are allowed"
            raise InvalidRequestError(field, problem)
    return tuple(
        _medium(kind, f"{field}[{index}]", payload)
        for field, kind, payloads, _ in given
        for index, payload in enumerate(payloads)
    )


def _medium(kind: MediaKind, field: str, payload: str) -> Medium:
    if not payload or payload.isspace():
        raise InvalidRequestError(field, "is empty")
    # Base64 takes four characters for three bytes; the rest is room for line breaks.
    max_chars = kind.max_bytes * 3 // 2
    if len(payload) > max_chars:
        problem = f"has {len(payload):,} characters, at most {max_chars:,} are read"
        raise InvalidRequestError(field, problem)
    return Medium(kind, field, payload)


KWARGS_KEY = "chat_template_kwargs"
THINKING_KEY = "enable_thinking"
# Anthropic's object, and the name of the switch in some templates.
ANTHROPIC_KEY = "thinking"
EFFORT_KEY = "reasoning_effort"
NO_EFFORT = "none"
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
    `enable_thinking`, `thinking`, `reasoning_effort` and `thinking_budget`. An effort of `none`, or
    a budget of 0, disables thinking. Other metadata belongs to the host.

    Raises:
        InvalidRequestError: The object is not JSON, or a switch is neither true nor false.
    """
    options = dict(_template_kwargs(metadata.get(KWARGS_KEY, "")))
    given: Mapping[str, JsonValue] = {
        key: metadata[key] for key in (THINKING_KEY, ANTHROPIC_KEY, EFFORT_KEY) if metadata.get(key)
    }
    if THINKING_KEY in given and truth(given[THINKING_KEY]) is None:
        problem = f"must be true or false, not {metadata[THINKING_KEY]!r}"
        raise InvalidRequestError(f'Metadata["{THINKING_KEY}"]', problem)
    wishes = (defaults.enable_thinking, _thinks(options), _thinks(given))
    thinks = next((wish for wish in reversed(wishes) if wish is not None), None)
    if EFFORT_KEY in given:
        options[EFFORT_KEY] = given[EFFORT_KEY]
    budget = thinking_budget(metadata, defaults)
    if budget is not None:
        options[BUDGET_KEY] = budget
    return _with_switch(options, thinks=False if budget == 0 else thinks)


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
    return require_object(field, parse_json(field, text)) if text.strip() else {}


def _thinks(source: Mapping[str, JsonValue]) -> bool | None:
    """Return whether a source wants thoughts, or `None` if it does not say; a switch wins."""
    for key in (THINKING_KEY, ANTHROPIC_KEY):
        found = truth(_object_or_word(source.get(key)))
        if found is not None:
            return found
    return False if _is_none(source.get(EFFORT_KEY)) else None


def _with_switch(options: dict[str, JsonValue], *, thinks: bool | None) -> dict[str, JsonValue]:
    """Return variables that agree about thinking."""
    if options.get(THINKING_KEY, "") is None:
        del options[THINKING_KEY]
    if thinks is None:
        return options
    options[THINKING_KEY] = thinks
    if ANTHROPIC_KEY in options:
        options[ANTHROPIC_KEY] = thinks
    if not thinks and BUDGET_KEY in options:
        options[BUDGET_KEY] = 0
    if thinks and _is_none(options.get(EFFORT_KEY)):
        del options[EFFORT_KEY]
    return options


def _is_none(effort: JsonValue) -> bool:
    return isinstance(effort, str) and effort.strip().lower() == NO_EFFORT


def _object_or_word(value: JsonValue) -> JsonValue:
    """Return a value with JSON text of an object read: metadata has only text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return parse_json(ANTHROPIC_KEY, value)
        except InvalidRequestError:
            return None
    return value
