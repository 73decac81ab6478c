"""`Tools` and `ToolChoice`, in every spelling that reaches a backend."""

from collections.abc import Sequence

from backend.config import MAX_TOOLS
from backend.core.prompt import JsonValue, Tool, ToolChoice, ToolMode
from backend.errors import InvalidRequestError
from backend.rpc.json_fields import (
    JsonObject,
    json_type,
    parse_json,
    require_array,
    require_name,
    require_object,
)
from backend.rpc.limits import require_at_most

_MODES = {
    "none": ToolMode.NONE,
    "auto": ToolMode.AUTO,
    "required": ToolMode.REQUIRED,
    "any": ToolMode.REQUIRED,
}
_NAMED_TYPES = ("function", "tool")


def tools(text: str) -> tuple[Tool, ...]:
    """Return the functions of an OpenAI-style JSON array; a bare function gets its wrapper.

    Raises:
        InvalidRequestError: There are too many, or one has no name, or the name of another.
    """
    offered = parse_json("Tools", text) if text.strip() else None
    if offered is None:
        return ()
    entries = require_array("Tools", offered)
    require_at_most("Tools", entries, MAX_TOOLS)
    parsed: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        tool = _tool(f"Tools[{index}]", entry)
        if tool.name in parsed:
            raise InvalidRequestError(f"Tools[{index}]", f"{tool.name!r} is offered twice")
        parsed[tool.name] = tool
    return tuple(parsed.values())


def tool_choice(text: str, offered: Sequence[Tool]) -> ToolChoice:
    """Return the choice of a bare word, of a JSON string or of an object.

    JSON may be encoded twice. Objects are OpenAI's, its older flat form, or Anthropic's.

    Raises:
        InvalidRequestError: It is none of these, or wants a tool that is not offered.
    """
    choice = _choice(text.strip())
    if choice.mode is ToolMode.REQUIRED and not offered:
        raise InvalidRequestError("ToolChoice", "wants a tool call, but Tools is empty")
    if choice.mode is ToolMode.NAMED and choice.name not in {tool.name for tool in offered}:
        raise InvalidRequestError("ToolChoice", f"names {choice.name!r}, which is not in Tools")
    return choice


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


def _choice(text: str) -> ToolChoice:
    if not text:
        return ToolChoice()
    if text in _MODES:
        return ToolChoice(_MODES[text])
    match parse_json("ToolChoice", text):
        case None:
            return ToolChoice()
        case str() as inner:
            return _choice(inner.strip())
        case dict() as choice:
            return _choice_object(choice)
        case other:
            problem = f"must be a word or an object, not {json_type(other)}"
            raise InvalidRequestError("ToolChoice", problem)


def _choice_object(choice: JsonObject) -> ToolChoice:
    kind = choice.get("type", "function")
    if kind in _NAMED_TYPES:
        function = require_object("ToolChoice.function", choice.get("function", choice))
        return ToolChoice(ToolMode.NAMED, require_name("ToolChoice.name", function.get("name")))
    if isinstance(kind, str) and kind in _MODES:
        return ToolChoice(_MODES[kind])
    raise InvalidRequestError("ToolChoice.type", f"{kind!r} is not a kind of choice")
