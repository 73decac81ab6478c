"""`Tools` and `ToolChoice`, in every spelling that reaches a backend."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backend.config import MAX_TOOLS
from backend.core.prompt import JsonValue, Tool, ToolChoice, ToolMode
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.json_fields import (
    JsonObject,
    json_type,
    parse_json,
    require_array,
    require_name,
    require_object,
)
from backend.rpc.parsing.limits import require_at_most

_MODES = {
    "none": ToolMode.NONE,
    "auto": ToolMode.AUTO,
    "required": ToolMode.REQUIRED,
    "any": ToolMode.REQUIRED,
}
_NAMED_TYPES = ("function", "tool")
_SUBSET_TYPE = "allowed_tools"
_PARALLEL_KEY = "parallel_tool_calls"
_NOT_PARALLEL_KEY = "disable_parallel_tool_use"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how a reply may use them.

    Attributes:
        is_parallel: Whether a reply may contain several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    is_parallel: bool = True


def tool_use(request: pb.PredictOptions) -> ToolUse:
    """Return the tools that a request offers, its choice, and whether calls may be parallel.

    Raises:
        InvalidRequestError: `Tools` or `ToolChoice` is malformed, or they do not fit.
    """
    offered = tools(request.Tools)
    value = _choice_value(request.ToolChoice)
    if isinstance(value, Mapping) and value.get("type") == _SUBSET_TYPE:
        offered, value = _allowed(offered, value)
    choice = _checked(_choice(value), offered)
    forbids = isinstance(value, Mapping) and value.get(_NOT_PARALLEL_KEY) is True
    return ToolUse(offered, choice, not forbids and _allows_parallel(request.Metadata))


def tools(text: str) -> tuple[Tool, ...]:
    """Return the functions of an OpenAI-style JSON array; a bare function gets its wrapper.

    Raises:
        InvalidRequestError: There are too many, one has no name, or two different ones
            share a name; duplicates are allowed.
    """
    offered = parse_json("Tools", text) if text.strip() else None
    if offered is None:
        return ()
    entries = require_array("Tools", offered)
    require_at_most("Tools", entries, MAX_TOOLS)
    parsed: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        tool = _tool(f"Tools[{index}]", entry)
        if parsed.get(tool.name, tool) != tool:
            raise InvalidRequestError(
                f"Tools[{index}]", f"{tool.name!r} is offered twice, with other words"
            )
        parsed[tool.name] = tool
    return tuple(parsed.values())


def tool_choice(text: str, offered: Sequence[Tool]) -> ToolChoice:
    """Return the choice given by a bare word, a JSON string or an object.

    JSON may be encoded twice. Objects are OpenAI's, its older flat form, or Anthropic's.

    Raises:
        InvalidRequestError: It is none of these, or names a tool that is not offered.
    """
    return _checked(_choice(_choice_value(text)), offered)


def _tool(field: str, entry: JsonValue) -> Tool:
    schema = require_object(field, entry)
    if "function" not in schema and "name" in schema:
        schema = {"type": "function", "function": _without_type(schema)}
    if schema.get("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type", f"{schema['type']!r} is not 'function'")
    function = require_object(f"{field}.function", schema.get("function"))
    name = require_name(f"{field}.function.name", function.get("name"))
    parameters = function.get("parameters")
    if parameters is not None:
        require_object(f"{field}.function.parameters", parameters)
    return Tool(name=name, schema=schema)


def _without_type(function: JsonObject) -> JsonObject:
    return {key: value for key, value in function.items() if key != "type"}


def _choice_value(text: str) -> JsonValue:
    """Return a bare word as it is, and the value of JSON, which may be encoded twice."""
    text = text.strip()
    if not text or text in _MODES:
        return text
    value = parse_json("ToolChoice", text)
    return _choice_value(value) if isinstance(value, str) else value


def _choice(value: JsonValue) -> ToolChoice:
    match value:
        case None | "":
            return ToolChoice()
        case str():
            return ToolChoice(_MODES[value])
        case dict():
            return _choice_object(value)
        case other:
            problem = f"must be a word or an object, not {json_type(other)}"
            raise InvalidRequestError("ToolChoice", problem)


def _checked(choice: ToolChoice, offered: Sequence[Tool]) -> ToolChoice:
    if choice.mode is ToolMode.REQUIRED and not offered:
        raise InvalidRequestError("ToolChoice", "wants a tool call, but Tools is empty")
    if choice.mode is ToolMode.NAMED and choice.name not in {tool.name for tool in offered}:
        raise InvalidRequestError("ToolChoice", f"names {choice.name!r}, which is not in Tools")
    return choice


def _allowed(
    offered: Sequence[Tool], choice: Mapping[str, JsonValue]
) -> tuple[tuple[Tool, ...], JsonValue]:
    """Return the tools left by OpenAI's `allowed_tools`, and the choice among them."""
    field_name = f"ToolChoice.{_SUBSET_TYPE}"
    # The Responses API writes mode and tools flat; Chat Completions has them in an object.
    subset = require_object(field_name, choice.get(_SUBSET_TYPE, choice))
    entries = require_array(f"{field_name}.tools", subset.get("tools"))
    names = {_allowed_name(f"{field_name}.tools[{i}]", entry) for i, entry in enumerate(entries)}
    if unknown := names.difference(tool.name for tool in offered):
        problem = f"names {min(unknown)!r}, which is not in Tools"
        raise InvalidRequestError(f"{field_name}.tools", problem)
    mode = subset.get("mode", ToolMode.AUTO.value)
    if not isinstance(mode, str) or mode not in _MODES:
        raise InvalidRequestError(f"{field_name}.mode", f"{mode!r} is not one of {list(_MODES)}")
    return tuple(tool for tool in offered if tool.name in names), mode


def _allowed_name(field_name: str, entry: JsonValue) -> str:
    value = require_object(field_name, entry)
    function = require_object(f"{field_name}.function", value.get("function", value))
    return require_name(f"{field_name}.name", function.get("name"))


def _allows_parallel(metadata: Mapping[str, str]) -> bool:
    """Return whether OpenAI's `parallel_tool_calls` allows several calls."""
    word = metadata.get(_PARALLEL_KEY, "").strip().lower()
    if word not in ("", "true", "false"):
        log.info("Metadata[%r] is ignored: %r is neither true nor false", _PARALLEL_KEY, word[:32])
    return word != "false"


def _choice_object(choice: JsonObject) -> ToolChoice:
    kind = choice.get("type", "function")
    if kind in _NAMED_TYPES:
        function = require_object("ToolChoice.function", choice.get("function", choice))
        return ToolChoice(ToolMode.NAMED, require_name("ToolChoice.name", function.get("name")))
    if isinstance(kind, str) and kind in _MODES:
        return ToolChoice(_MODES[kind])
    raise InvalidRequestError("ToolChoice.type", f"{kind!r} is not a kind of choice")
