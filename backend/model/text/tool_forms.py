"""Fits tools to a chat template that refuses them, or loses part of them.

Clients leave out keys that templates read without a check, and send schemas that templates do not
expect. Whether a template takes a tool is found by rendering it. A tool that it takes stays as it
is; any other gets the nearest form that it takes. Nothing here changes the allowed content of a
call.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

from msgspec.structs import replace

from backend.core.prompt import RESULT_ROLES, JsonValue, Message, Placement, Tool, ToolCall
from backend.formats.objects import HERMES_CLOSER, HERMES_OPENER
from backend.formats.spelling import PARAGRAPH, escape_marks
from backend.model.text.conversation import CallStyle, Turn, to_turns
from backend.model.text.renderer import Renderer, RenderError, Schema, render

_SYSTEM_ROLES = frozenset({"system", "developer"})
_INTRODUCTION = """\
You can call functions. Each line between <tools> and </tools> describes one in JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as one JSON object between these marks:
{opener}
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
{closer}

Repeat this for every call you need, and stop after the last one: the results follow between \
<tool_response> and </tool_response>. If no function helps, answer without these marks."""


def with_written_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation that shows tools, calls and results to any template, as text.

    Results are in the order of their calls: the text has no ids.
    """
    first = next((n for n, each in enumerate(messages) if each.role not in _SYSTEM_ROLES), None)
    leading = list(messages[:first])
    system = leading.pop() if leading else Message(role="system")
    between = PARAGRAPH if system.content else ""
    shown = replace(system, content=f"{system.content}{between}{_introduction(tools)}")
    rest = () if first is None else messages[first:]
    return [*leading, shown, *_spelled(rest)]


def written_call(call: ToolCall) -> str:
    """Return a call as text, with its arguments as they are if they are an object without marks."""
    arguments = call.arguments if call.arguments.strip() else "{}"
    if not _is_object(arguments):
        arguments = json.dumps(arguments, ensure_ascii=False)
    arguments, name = escape_marks(arguments), json.dumps(call.name, ensure_ascii=False)
    return f'{HERMES_OPENER}\n{{"name": {name}, "arguments": {arguments}}}\n{HERMES_CLOSER}'


def _introduction(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    return _INTRODUCTION.format(tools=lines, opener=HERMES_OPENER, closer=HERMES_CLOSER)


def _spelled(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with calls and results as text; adjacent results are one user message."""
    results: list[Message] = []
    for message in messages:
        if message.role in RESULT_ROLES:
            results.append(message)
            continue
        if results:
            yield _joined(results)
            results = []
        yield _with_calls(message)
    if results:
        yield _joined(results)


def _with_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    texts = [message.content] if message.content else []
    content = "\n".join([*texts, *map(written_call, message.tool_calls)])
    return replace(message, content=content, tool_calls=())


def _joined(results: Sequence[Message]) -> Message:
    """Return results as one user message."""
    content, media = "", []
    for result in results:
        content += "\n<tool_response>\n" if content else "<tool_response>\n"
        start = len(content)
        media += [Placement(start + placed.offset, placed.kind) for placed in result.media]
        content += f"{result.content}\n</tool_response>"
    return Message(role="user", content=content, media=tuple(media))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


Form: TypeAlias = Callable[[Schema], Schema]

# Forms are remembered for this many tools.
MAX_REMEMBERED = 4096
# So many references of a tool are followed: schemas may multiply.
_MAX_REFERENCES = 64

_QUESTIONS: tuple[Sequence[Turn], ...] = (
    to_turns([Message(role="user", content="?")], CallStyle()),
    to_turns([Message(role="system"), Message(role="user", content="?")], CallStyle()),
)
_NOTE = "noted_here"
_EXAMPLE: Schema = {
    "type": "function",
    "function": {
        "name": "sample",
        "description": "purpose",
        "parameters": {
            "type": "object",
            "properties": {"detail": {"type": "string", "description": _NOTE}},
        },
    },
}
_WORD = re.compile(r"[0-9A-Za-z_]+")
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}}
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
# Names of types in other languages.
_SYNONYMS = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("dict", "map"), "object"),
    "int": "integer",
    "bool": "boolean",
    "list": "array",
    "none": "null",
}
_UNIONS = ("anyOf", "oneOf", "allOf")
_TEXTS = ("description", "title")
_NULLABLE = ("const", "default")
# Values, which may look like schemas.
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")


class ToolForms:
    """Finds the form of a tool that a template takes, and remembers it.

    Refusals are slow in templates that recurse without end, so the form found for one property
    holds for all of the same shape.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: dict[str, Schema] = {}
        # The number of the form that a template takes, by the shape of a property.
        self._taken: dict[str, int] = {}
        self._view: _View | None = None

    def fitted(self, tools: Sequence[Schema]) -> list[Schema]:
        """Return tools in forms that the template takes, each for itself: prompts keep prefixes.

        Raises:
            RenderTimeoutError: The template takes too long.
        """
        if tools and self._view is None:
            self._view = _View(self._renderer)
        return [self._fitted(tool, self._view) for tool in tools if self._view]

    def _fitted(self, tool: Schema, view: "_View") -> Schema:
        key = json.dumps(tool)
        found = self._known.get(key)
        if found is None:
            found = _nearest(view, view.wanted(tool), self._forms(tool, view))[1]
            _make_room(self._known)
            self._known[key] = found
        return found

    def _forms(self, tool: Schema, view: "_View") -> Iterator[Schema]:
        """Yield forms of a tool: as it is, with its properties changed, with the root changed too.

        A tool gets the same form whatever was found before, so every step learns before it changes
        more.
        """
        yield from self._filled(tool)
        tool = inlined(tool)
        root = plain_root(described(tool))
        yield from self._filled(tool)
        self._learn(root, _properties(tool), view)
        yield from self._filled(tool)
        yield plain_root(with_parameters(described(tool)))
        self._learn(root, _properties(root), view)
        yield self._with_known_forms(root)
        yield all_in_words(tool)

    def _filled(self, tool: Schema) -> Iterator[Schema]:
        form = self._with_known_forms(tool)
        yield form
        for change in (described, with_parameters):
            form = change(form)
            yield form

    def _with_known_forms(self, tool: Schema) -> Schema:
        """Return a tool whose properties have the forms that were found for their shapes."""
        properties = _properties(tool)
        numbers = {name: self._taken.get(_shape(schema), 0) for name, schema in properties.items()}
        if not any(numbers.values()):
            return tool
        forms = {
            name: next(islice(property_forms(schema), numbers[name], None))
            for name, schema in properties.items()
        }
        return _with_properties(tool, forms)

    def _learn(self, root: Schema, properties: Mapping[str, JsonValue], view: "_View") -> None:
        """Find the nearest form of each property that the template takes alone."""
        for name, schema in properties.items():
            shape = _shape(schema)
            if shape not in self._taken:
                forms = (_with_properties(root, {name: form}) for form in property_forms(schema))
                wanted = view.wanted(_with_properties(root, {name: schema}))
                number, _ = _nearest(view, wanted, forms)
                _make_room(self._taken)
                self._taken[shape] = number


class _View:
    """The parts of a tool that a template shows, in a conversation of one question."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._question, self._plain = _QUESTIONS[0], ""
        text = None
        for question in _QUESTIONS:
            plain = self._rendered(question, None)
            text = self._rendered(question, [_EXAMPLE])
            if text is not None and text != plain:
                self._question, self._plain = question, plain or ""
                break
        self._shown = frozenset(
            part
            for part, words in _words_by_part(_EXAMPLE).items()
            if all(word in (text or "") for word in words)
        )
        if _NOTE not in (text or ""):
            self._shown -= {"choices"}

    def wanted(self, tool: Schema) -> frozenset[str]:
        """Return the words of a tool that the template writes for other tools."""
        words = _words_by_part(tool)
        return frozenset(word for part in self._shown for word in words[part])

    def lost(self, tool: Schema, wanted: frozenset[str]) -> int | None:
        """Return how many words the template loses, or `None` if it refuses the tool."""
        text = self._rendered(self._question, [tool])
        if text is None:
            return None
        return len(wanted) if text == self._plain else sum(word not in text for word in wanted)

    def _rendered(self, turns: Sequence[Turn], tools: Sequence[Schema] | None) -> str | None:
        try:
            # Only a plain conversation may need repairs: here a refusal is an answer.
            return render(self._renderer, turns, tools, {}, repairs=())
        except RenderError:
            return None


def _nearest(view: _View, wanted: frozenset[str], forms: Iterator[Schema]) -> tuple[int, Schema]:
    """Return the first form that loses nothing, or else the one that loses least, and its number.

    The first one is the tool as it is, which is also the answer if all are refused.
    """
    nearest = next(forms)
    number, least, seen = 0, None, set[str]()
    for place, form in enumerate(chain((nearest,), forms)):
        key = json.dumps(form)
        lost = None if key in seen else view.lost(form, wanted)
        seen.add(key)
        if lost is not None and (least is None or lost < least):
            number, nearest, least = place, form, lost
        if lost == 0:
            break
    return number, nearest


def _make_room(memory: dict[str, Any]) -> None:
    if len(memory) >= MAX_REMEMBERED:
        memory.clear()


def described(tool: Schema) -> Schema:
    """Give a tool a description that is text."""
    description = _function(tool).get("description")
    if isinstance(description, str):
        return tool
    text = "" if description is None else json.dumps(description, ensure_ascii=False)
    return _changed(tool, description=text)


def with_parameters(tool: Schema) -> Schema:
    """Give a tool parameters with a type and properties."""
    return _changed(tool, parameters={**_NO_PARAMETERS, **_parameters(tool)})


def plain_root(tool: Schema) -> Schema:
    """Make the parameters an object of named properties, whatever their schema is."""
    root = {**tidied(_parameters(tool)), "type": "object"}
    return _changed(tool, parameters={**root, "properties": _all_properties(root)})


def all_in_words(tool: Schema) -> Schema:
    """Write the parameters as JSON into the description."""
    function = _function(described(tool))
    schema = json.dumps(function.get("parameters", {}), ensure_ascii=False)
    text = f"{function['description']}\nParameters, as a JSON schema: {schema}".lstrip()
    return _changed(tool, description=text, parameters=_NO_PARAMETERS)


def inlined(tool: Schema) -> Schema:
    """Put the schemas that a tool refers to in the places of the references."""
    root = _parameters(tool)
    if '"$ref"' not in json.dumps(root):
        return tool
    followed = 0

    def inline(value: JsonValue, within: tuple[str, ...]) -> JsonValue:
        nonlocal followed
        if isinstance(value, list):
            return [inline(each, within) for each in value]
        if not isinstance(value, Mapping):
            return value
        inner = {
            key: each if key in _VALUES else inline(each, within)
            for key, each in value.items()
            if key != "$ref" or not isinstance(each, str)
        }
        reference = value.get("$ref")
        if not isinstance(reference, str):
            return inner
        followed += 1
        if reference in within or followed > _MAX_REFERENCES:
            return {"type": "object", **inner}
        return {**_object(inline(_referenced(root, reference), (*within, reference))), **inner}

    kept = {key: each for key, each in root.items() if key not in _DEFINITIONS}
    return _changed(tool, parameters=inline(kept, ("#",)))


def tidied(schema: JsonValue) -> Schema:
    """Return a schema that is an object, as are the schemas in it; keywords have their types.

    A keyword of another type says nothing that a template could show.
    """
    match schema:
        case str():
            known = schema in _TYPES or schema in _SYNONYMS
            return {"type" if known else "description": schema}
        case Mapping():
            tidy = {key: _tidy_keyword(key, value) for key, value in schema.items()}
            return {key: tidy[key] for key in tidy if tidy[key] is not None or key in _NULLABLE}
        case list() if schema and len(_texts(schema)) == len(schema):
            return {"type": schema}
        case _:
            return {}


def one_type_each(schema: Schema) -> Schema:
    """Replace lists of types by a choice of schemas, and types unknown to JSON by others."""
    changed = _with_inner(schema, one_type_each)
    kind = changed.get("type")
    if kind is None:
        return changed
    rest = {key: value for key, value in changed.items() if key != "type"}
    names = [kind] if isinstance(kind, str) else _texts(kind)
    known = [name for name in map(_json_type, names) if name]
    if len(known) == 1:
        return {**changed, "type": known[0]}
    if not known or "anyOf" in rest:
        return rest
    return {**rest, "anyOf": [{"type": name} for name in known]}


def first_of_each(schema: Schema) -> Schema:
    """Replace choices by their first schema that is not null."""
    chosen = dict(schema)
    for key in _UNIONS:
        found = chosen.pop(key, None)
        choices = [each for each in _sequence(found) if isinstance(each, Mapping)]
        first = next((each for each in choices if each.get("type") != "null"), {})
        chosen = {**first, **chosen}
    return _with_inner(chosen, first_of_each)


def in_words(schema: JsonValue) -> Schema:
    """Write a schema as JSON into its description; its type stays."""
    first = first_of_each(one_type_each(tidied(schema)))
    kind, description = first.get("type", "string"), first.get("description", "")
    text = f"{description}\nJSON schema: {json.dumps(schema, ensure_ascii=False)}".lstrip()
    return {"type": kind, "description": text}


def property_forms(schema: JsonValue) -> Iterator[JsonValue]:
    """Yield forms of a property, the nearest first; some templates demand a description."""
    yield schema
    yield {"description": "", **schema} if isinstance(schema, Mapping) else schema
    tidy = tidied(schema)
    single = one_type_each(tidy)
    for form in (tidy, single, first_of_each(single)):
        yield form
        yield {"description": "", **form}
    yield in_words(schema)
    yield {"type": "string", "description": in_words(schema)["description"]}


def _shape(schema: JsonValue) -> str:
    """Return a schema as JSON without its texts, which templates treat alike."""
    return json.dumps(_without_texts(schema))


def _without_texts(value: JsonValue) -> JsonValue:
    if isinstance(value, Mapping):
        return {
            key: "" if key in _TEXTS and isinstance(each, str) else _without_texts(each)
            for key, each in value.items()
        }
    return [_without_texts(each) for each in value] if isinstance(value, list) else value


def _tidy_keyword(key: str, value: JsonValue) -> JsonValue:
    """Return the value of a keyword, or `None` if it has a type that says nothing."""
    tidy = _TIDY.get(key)
    return value if tidy is None or value is None else tidy(value)


def _tidy_text(value: JsonValue) -> JsonValue:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tidy_type(value: JsonValue) -> JsonValue:
    return value if isinstance(value, str) else _texts(value) or None


def _tidy_items(value: JsonValue) -> JsonValue:
    """Return the schema of items; older drafts list one for each place."""
    schemas = [tidied(each) for each in _sequence(value)]
    return {"anyOf": schemas} if schemas else tidied(value)


def _tidy_by_name(value: JsonValue) -> JsonValue:
    return {name: tidied(each) for name, each in _by_name(value).items()}


def _tidy_choices(value: JsonValue) -> JsonValue:
    return [tidied(each) for each in _sequence(value)] or None


_TIDY: Mapping[str, Callable[[JsonValue], JsonValue]] = {
    **dict.fromkeys(("description", "title"), _tidy_text),
    **dict.fromkeys(_SCHEMAS_BY_NAME, _tidy_by_name),
    **dict.fromkeys(_UNIONS, _tidy_choices),
    "type": _tidy_type,
    "required": lambda value: _texts(value),
    "enum": lambda value: value if isinstance(value, list) else [value],
    "items": _tidy_items,
    "not": tidied,
    "additionalProperties": lambda value: value if isinstance(value, bool) else tidied(value),
}


def _with_inner(schema: Schema, change: Form) -> Schema:
    """Return a tidied schema with the schemas directly in it changed."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            changed[key] = {
                name: change(each) for name, each in value.items() if isinstance(each, Mapping)
            }
        elif key in _UNIONS:
            changed[key] = [change(each) for each in _sequence(value) if isinstance(each, Mapping)]
        elif key in ("items", "additionalProperties", "not") and isinstance(value, Mapping):
            changed[key] = change(value)
    return changed


def _all_properties(root: Schema) -> dict[str, JsonValue]:
    """Return the properties of a tidied schema and of its choices, with references followed."""
    found: dict[str, JsonValue] = {}
    seen: set[str] = set()
    schemas: list[JsonValue] = [root]
    for schema in schemas:
        if not isinstance(schema, Mapping):
            continue
        for name, each in _by_name(schema.get("properties")).items():
            found.setdefault(name, each)
        for key in _UNIONS:
            schemas += _sequence(schema.get(key))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            schemas.append(_referenced(root, reference))
    return found


def _referenced(root: Schema, reference: str) -> JsonValue:
    value: JsonValue = root
    for part in reference.removeprefix("#").split("/")[1:]:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _words_by_part(tool: Schema) -> Mapping[str, frozenset[str]]:
    """Return the words that a template writes for a tool, by the part that they come from.

    Escapes differ between templates, so only letters, digits and underscores count.
    """
    function = _function(tool)
    root = tidied(_parameters(inlined(tool)))
    texts: dict[str, list[JsonValue]] = {
        "name": [function.get("name")],
        "description": [function.get("description")],
        "properties": list(_all_properties(root)),
        "choices": list(_choices(root, is_root=True)),
    }
    return {
        part: frozenset(word for text in of_part for word in _WORD.findall(str(text or "")))
        for part, of_part in texts.items()
    }


def _choices(schema: JsonValue, *, is_root: bool = False) -> Iterator[JsonValue]:
    """Yield the texts that a tidied schema allows, and the names of nested properties."""
    if not isinstance(schema, Mapping):
        return
    properties = _by_name(schema.get("properties"))
    yield from () if is_root else properties
    values = (*_sequence(schema.get("enum")), schema.get("const"))
    yield from (value for value in values if isinstance(value, str))
    for key in _UNIONS:
        for each in _sequence(schema.get(key)):
            yield from _choices(each, is_root=is_root)
    for each in (*properties.values(), schema.get("items"), schema.get("additionalProperties")):
        yield from _choices(each)


def _function(tool: Schema) -> Schema:
    return _object(tool.get("function"))


def _parameters(tool: Schema) -> Schema:
    return _object(_function(tool).get("parameters"))


def _properties(tool: Schema) -> Schema:
    return _object(_parameters(tool).get("properties"))


def _object(value: JsonValue) -> Schema:
    return value if isinstance(value, Mapping) else {}


def _changed(tool: Schema, **fields: JsonValue) -> Schema:
    """Return a tool with other fields of its function."""
    return {**tool, "function": {**_function(tool), **fields}}


def _with_properties(tool: Schema, properties: Schema) -> Schema:
    return _changed(tool, parameters={**_parameters(tool), "properties": properties})


def _by_name(value: JsonValue) -> Mapping[str, JsonValue]:
    """Return schemas by name; some clients send a list of objects with their names."""
    if isinstance(value, Mapping):
        return value
    named = [each for each in _sequence(value) if isinstance(each, Mapping)]
    return {str(each["name"]): each for each in named if isinstance(each.get("name"), str)}


def _json_type(name: JsonValue) -> str | None:
    word = str(name).lower()
    known = _SYNONYMS.get(word, word)
    return known if known in _TYPES else None


def _sequence(value: JsonValue) -> Sequence[JsonValue]:
    return value if isinstance(value, list) else ()


def _texts(value: JsonValue) -> list[JsonValue]:
    return [each for each in _sequence(value) if isinstance(each, str)]
