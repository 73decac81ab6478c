"""`Messages`, `Metadata`, `Tools` and `ToolChoice`: the input of the chat template."""

import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backend.config import MAX_MESSAGES, MAX_TOOLS, MediaLimits, RequestDefaults
from backend.core.prompt import (
    MEDIA_MARKER,
    RESULT_ROLES,
    JsonValue,
    MediaKind,
    Medium,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from backend.errors import InvalidRequestError
from backend.output.reply_format import warn_once
from backend.pb import backend_pb2 as pb
from backend.rpc.host_rules import wished_variables
from backend.rpc.parsing.checks import (
    JsonObject,
    json_type,
    parse_json,
    require_array,
    require_at_most,
    require_name,
    require_object,
    truth,
)

log = logging.getLogger(__name__)


def media(request: pb.PredictOptions, limits: MediaLimits) -> tuple[Medium, ...]:
    """Return the audios, images and videos of a request, each kind in its own order.

    The kinds come in the order in which the host's template puts their markers.
    """
    given = (
        ("Audios", MediaKind.AUDIO, request.Audios, limits.audios),
        ("Images", MediaKind.IMAGE, request.Images, limits.images),
        ("Videos", MediaKind.VIDEO, request.Videos, limits.videos),
    )
    for name, _, payloads, limit in given:
        if len(payloads) > limit:
            problem = f"holds {len(payloads)}, at most {limit} per request are allowed"
            raise InvalidRequestError(name, problem)
    return tuple(
        _medium(kind, f"{name}[{index}]", payload)
        for name, kind, payloads, _ in given
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
CONTINUE_KEY = "continue_final_message"
_MAX_DIGITS = 9
_CUSTOM = "custom"
_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def messages(request: pb.PredictOptions) -> tuple[Message, ...]:
    """Return the conversation."""
    require_at_most("Messages", request.Messages, MAX_MESSAGES)
    return tuple(itertools.starmap(_message, enumerate(request.Messages)))


def in_order_of_calls(conversation: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation whose results have the order of the calls that they answer.

    A client that runs calls at the same time may send results as they come, and most templates
    show no ids: the model would take one for another. Results with marked media keep the order of
    these.
    """
    ordered: list[Message] = []
    places: Mapping[str, int] = {}
    for are_results, group in itertools.groupby(conversation, _is_result):
        run = list(group)
        if are_results and all(_has_place(result, places) for result in run):
            run.sort(key=lambda result: places[result.tool_call_id])
        ordered += run
        places = {call.call_id: place for place, call in enumerate(run[-1].tool_calls)}
    return tuple(ordered)


def template_options(
    metadata: Mapping[str, str], defaults: RequestDefaults
) -> Mapping[str, JsonValue]:
    """Return the variables of the template; a later source wins.

    The sources are the model's options, the object `chat_template_kwargs`, and the keys
    `enable_thinking`, `thinking`, `reasoning_effort` and `thinking_budget`. An effort of `none`, or
    a budget of 0, disables thinking. Other metadata belongs to the host.
    """
    options = wished_variables(_template_kwargs(metadata.get(KWARGS_KEY, "")), metadata)
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


def continues(metadata: Mapping[str, str], conversation: Sequence[Message]) -> bool:
    """Return whether the reply goes on with the last message of a conversation."""
    if not (word := metadata.get(CONTINUE_KEY)):
        return False
    field = f'Metadata["{CONTINUE_KEY}"]'
    wish = truth(word)
    if wish is None:
        raise InvalidRequestError(field, f"must be true or false, not {word[:32]!r}")
    last = conversation[-1]
    if wish and (last.role != "assistant" or last.tool_calls or not last.content.strip()):
        problem = "needs a last message of the assistant, with text and without calls"
        raise InvalidRequestError(field, problem)
    return wish


def thinking_budget(metadata: Mapping[str, str], defaults: RequestDefaults) -> int | None:
    """Return the maximum tokens of thought, from the request or the model's options."""
    text = metadata.get(BUDGET_KEY, "").strip()
    if not text:
        return defaults.thinking_budget
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        problem = f"must be a number of tokens, 0 or more, not {text[:32]!r}"
        raise InvalidRequestError(f'Metadata["{BUDGET_KEY}"]', problem)
    return int(text)


def _is_result(message: Message) -> bool:
    return message.role in RESULT_ROLES


def _has_place(result: Message, places: Mapping[str, int]) -> bool:
    return result.tool_call_id in places and MEDIA_MARKER not in result.content


def _message(index: int, message: pb.Message) -> Message:
    role, calls = message.role, message.tool_calls
    # Names of fields take a third of the time, and are for errors.
    if not role.strip():
        require_name(f"Messages[{index}].role", role)
    return Message(
        role=role,
        content=message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
        tool_calls=_tool_calls(f"Messages[{index}].tool_calls", calls) if calls else (),
    )


def _tool_calls(field: str, text: str) -> tuple[ToolCall, ...]:
    calls = parse_json(field, _with_whole_characters(text)) if text.strip() else None
    if calls is None:
        return ()
    return tuple(
        _tool_call(f"{field}[{index}]", call)
        for index, call in enumerate(require_array(field, calls))
    )


def _tool_call(field: str, value: JsonValue) -> ToolCall:
    call = require_object(field, value)
    function = require_object(f"{field}.function", call.get("function", call.get(_CUSTOM, call)))
    call_id = call.get("id")
    return ToolCall(
        call_id=call_id if isinstance(call_id, str) else "",
        name=require_name(f"{field}.function.name", function.get("name")),
        # Those of a custom tool are any text.
        arguments=_arguments(function.get("arguments", function.get("input"))),
    )


def _arguments(value: JsonValue) -> str:
    """Return arguments as JSON text, as most hosts send them already."""
    if value is None or value == "":
        return "{}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _with_whole_characters(text)


def _with_whole_characters(text: str) -> str:
    """Return JSON with the sign for a lost character in place of half a one.

    A model wrote it or a client cut it: no prompt can hold it, and the conversation could not go
    on.
    """
    return _ESCAPES.sub(_whole_character, text) if "\\u" in text else text


def _whole_character(escape: re.Match[str]) -> str:
    return "\\ufffd" if escape["half"] else escape[0]


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


_MODES = {
    "none": ToolMode.NONE,
    "auto": ToolMode.AUTO,
    "required": ToolMode.REQUIRED,
    "any": ToolMode.REQUIRED,
}
_FUNCTION = "function"
_NAMED_TYPES = (_FUNCTION, "tool", _CUSTOM)
# Keys of the parameters in the forms of Anthropic and MCP.
_PARAMETER_KEYS = ("input_schema", "inputSchema")
# Anthropic's keys that address the API rather than the model.
_CALLER_KEYS = ("cache_control",)
# The host writes tools of other kinds like this.
_NAMELESS = "function without a name"
# Kinds of tools that other servers run; the log names no words of a caller's own.
_KNOWN_KINDS = frozenset(
    {
        *("web_search", "web_search_preview", "web_fetch", "file_search", "image_generation"),
        *("code_interpreter", "code_execution", "computer", "computer_use_preview", "bash"),
        *("text_editor", "memory", "local_shell", "shell", "apply_patch", "mcp", "mcp_toolset"),
        *("custom", "namespace", "tool_search", "builtin_function"),
    }
)
_DATE = re.compile(r"_[0-9]{8}$")
_SUBSET_TYPE = "allowed_tools"
_PARALLEL_KEY = "parallel_tool_calls"
_NOT_PARALLEL_KEY = "disable_parallel_tool_use"


@dataclass(frozen=True, slots=True)
class Offer:
    """The content of `Tools`.

    Attributes:
        skipped: Kinds of the tools that cannot be called, by name or else by kind.
    """

    tools: tuple[Tool, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools."""
        return frozenset(tool.name for tool in self.tools)


@dataclass(frozen=True, slots=True)
class _Other:
    """A tool that is no function of the caller's, or has no name."""

    kind: str
    name: str = ""


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

    A choice is a bare word, a JSON string or an object: OpenAI's, its older flat form, or
    Anthropic's. JSON may be encoded twice.
    """
    offered = offer(request.Tools)
    value = _choice_value(request.ToolChoice)
    if isinstance(value, Mapping) and value.get("type") == _SUBSET_TYPE:
        offered, value = _allowed(offered, value)
    choice = _checked(_choice(value), offered)
    forbids = isinstance(value, Mapping) and value.get(_NOT_PARALLEL_KEY) is True
    return ToolUse(offered.tools, choice, not forbids and _allows_parallel(request.Metadata))


def offer(text: str) -> Offer:
    """Return the functions of a JSON array, each in OpenAI's form.

    A function may also come without its wrapper, or in the form of Anthropic or MCP. Tools of other
    kinds, such as `web_search`, and functions without a name are skipped: only a function of the
    caller's can be called. If two functions share a name, the last one counts: callers look up a
    call by its name.
    """
    entries = parse_json("Tools", text) if text.strip() else None
    if entries is None:
        return Offer()
    entries = require_array("Tools", entries)
    require_at_most("Tools", entries, MAX_TOOLS)
    parsed: dict[str, Tool] = {}
    skipped: dict[str, str] = {}
    for index, entry in enumerate(entries):
        tool = _tool(f"Tools[{index}]", entry)
        if isinstance(tool, _Other):
            skipped[tool.name or tool.kind] = tool.kind
            warn_once(f"Tools: {_logged(tool.kind)} is skipped: only functions can be called")
            continue
        if parsed.get(tool.name, tool) != tool:
            warn_once("Tools: two functions share a name: the last one counts")
        parsed[tool.name] = tool
    return Offer(tuple(parsed.values()), skipped)


def _tool(field: str, entry: JsonValue) -> Tool | _Other:
    schema = _wrapped(require_object(field, entry))
    kind = schema.get("type")
    if kind not in (None, _FUNCTION):
        return _Other(json.dumps(kind), _name_of(schema))
    value = schema.get("function")
    function = {} if value is None else require_object(f"{field}.function", value)
    name = function.get("name")
    if name is None or (isinstance(name, str) and not name.strip()):
        return _Other(_NAMELESS)
    name = require_name(f"{field}.function.name", name)
    return Tool(name=name, schema={**schema, "function": _without_nulls(function)})


def _wrapped(entry: JsonObject) -> JsonObject:
    """Return an entry in OpenAI's form, if it is a function without its wrapper."""
    if entry.get("function") is not None or "name" not in entry:
        return entry
    parameters = next((key for key in _PARAMETER_KEYS if key in entry), None)
    if parameters is None and entry.get("type") not in (None, _FUNCTION):
        return entry
    left_out = ("type", "function") if parameters is None else ("type", *_CALLER_KEYS)
    function = {key: value for key, value in entry.items() if key not in left_out}
    if parameters is not None:
        function = {
            "parameters" if key == parameters else key: value for key, value in function.items()
        }
    return {"type": _FUNCTION, "function": function}


def _without_nulls(function: JsonObject) -> JsonObject:
    """Return a function without a null in place of its description or parameters.

    So are parameters that are no object: such a function can be called with anything.
    """
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        warn_once("Tools: parameters that are not an object are left out")
        parameters = None
    is_absent = {
        "description": function.get("description") is None,
        "parameters": parameters is None,
    }
    return {key: value for key, value in function.items() if not is_absent.get(key)}


def _logged(kind: str) -> str:
    """Return the words of the log for a kind in JSON."""
    if kind == _NAMELESS:
        return f"a {kind}"
    word = _DATE.sub("", kind.strip('"'))
    return f"a tool of the type {word}" if word in _KNOWN_KINDS else "a tool of an unknown type"


def _name_of(schema: JsonObject) -> str:
    """Return the name of a tool of another kind, flat or in an object of that kind."""
    inner = schema.get(str(schema["type"]))
    name = (inner if isinstance(inner, Mapping) else schema).get("name")
    return name if isinstance(name, str) else ""


def _choice_value(text: str) -> JsonValue:
    """Return a bare word as it is, and the value of JSON, which may be encoded twice."""
    text = text.strip()
    if not text or text in _MODES:
        return text
    if text.isidentifier() and text not in ("null", "true", "false"):
        problem = f"{text[:32]!r} is not one of {list(_MODES)}; a tool is named by an object"
        raise InvalidRequestError("ToolChoice", problem)
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


def _checked(choice: ToolChoice, offered: Offer) -> ToolChoice:
    if choice.mode is ToolMode.REQUIRED and not offered.tools:
        kinds = ", ".join(sorted(set(offered.skipped.values())))
        rest = f"has only what is skipped: {kinds}" if kinds else "is empty"
        raise InvalidRequestError("ToolChoice", f"wants a tool call, but Tools {rest}")
    if choice.mode is ToolMode.NAMED and choice.name not in offered.names:
        kind = offered.skipped.get(choice.name)
        problem = (
            f"is of the type {kind}: only functions can be called" if kind else "is not in Tools"
        )
        raise InvalidRequestError("ToolChoice", f"names {choice.name!r}, which {problem}")
    return choice


def _allowed(offered: Offer, choice: Mapping[str, JsonValue]) -> tuple[Offer, JsonValue]:
    """Return the tools left by OpenAI's `allowed_tools`, and the choice among them."""
    field_name = f"ToolChoice.{_SUBSET_TYPE}"
    # The Responses API writes mode and tools flat; Chat Completions has them in an object.
    subset = require_object(field_name, choice.get(_SUBSET_TYPE, choice))
    entries = require_array(f"{field_name}.tools", subset.get("tools"))
    names = {_allowed_name(f"{field_name}.tools[{i}]", entry) for i, entry in enumerate(entries)}
    if unknown := names - offered.names - offered.skipped.keys() - {""}:
        problem = f"names {min(unknown)!r}, which is not in Tools"
        raise InvalidRequestError(f"{field_name}.tools", problem)
    mode = subset.get("mode", ToolMode.AUTO.value)
    if not isinstance(mode, str) or mode not in _MODES:
        raise InvalidRequestError(f"{field_name}.mode", f"{mode!r} is not one of {list(_MODES)}")
    left = tuple(tool for tool in offered.tools if tool.name in names)
    return Offer(left, offered.skipped), mode


def _allowed_name(field_name: str, entry: JsonValue) -> str:
    """Return the name of an allowed function, or "" for a tool of another kind."""
    value = require_object(field_name, entry)
    if value.get("type") not in (None, _FUNCTION):
        return ""
    function = require_object(f"{field_name}.function", value.get("function", value))
    return require_name(f"{field_name}.name", function.get("name"))


def _allows_parallel(metadata: Mapping[str, str]) -> bool:
    """Return whether OpenAI's `parallel_tool_calls` allows several calls."""
    word = metadata.get(_PARALLEL_KEY, "").strip().lower()
    if word not in ("", "true", "false"):
        log.info("Metadata[%r] is ignored: %r is neither true nor false", _PARALLEL_KEY, word[:32])
    return word != "false"


def _choice_object(choice: JsonObject) -> ToolChoice:
    if not choice:
        return ToolChoice()
    kind = choice.get("type", choice.get("mode", _FUNCTION))
    if kind in _NAMED_TYPES:
        inner = choice.get("function", choice.get(str(kind), choice))
        function = require_object("ToolChoice.function", inner)
        return ToolChoice(ToolMode.NAMED, require_name("ToolChoice.name", function.get("name")))
    if isinstance(kind, str) and kind in _MODES:
        return ToolChoice(_MODES[kind])
    hint = ": only functions can be called" if isinstance(kind, str) else ""
    raise InvalidRequestError("ToolChoice.type", f"{kind!r} is not a kind of choice{hint}")
