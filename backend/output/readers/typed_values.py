"""The values of a tool's arguments: their types, from its JSON schema, and their JSON.

Only types are read: checking values is up to the tool.
"""

import ast
import json
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice, product
from typing import TypeAlias, cast

from backend.core.prompt import JsonValue
from backend.output.readers.json_scanner import (
    SURROGATE,
    is_number,
)
from backend.output.readers.patterns import (
    MAX_TAG_CHARS,
    Piece,
    choice,
    fixed,
    maybe,
    sequence,
    spaced,
)

JsonSchema: TypeAlias = Mapping[str, JsonValue]
JsonTypes: TypeAlias = frozenset[str]

UNKNOWN: JsonTypes = frozenset()
STRING: JsonTypes = frozenset({"string"})
SCALARS: JsonTypes = frozenset({"number", "integer", "boolean", "null"})
NOT_A_STRING: JsonTypes = SCALARS | {"object", "array"}

_MAX_SCHEMAS = 256
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
# A bool is an int in Python: the order matters.
_TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (Mapping, "object"),
    (type(None), "null"),
    (object, "array"),
)
_MARKS = {"properties": "object", "items": "array"}
# As Python and C name types; schemas written by hand have these.
_OTHER_NAMES = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "none": "null",
}


class ParameterTypes:
    """The names and types of a tool's arguments.

    Attributes:
        required: The names of those that a call must have.
        takes_others: Whether the schema expressly allows arguments that it does not declare.
    """

    def __init__(self, schema: JsonSchema, root: JsonSchema | None = None) -> None:
        """Read a schema; its references are relative to `root`, or to itself."""
        self._root = root or schema
        self._properties: JsonSchema = {}
        self.takes_others = False
        for way in self._alternatives(schema):
            self._properties = {**_allowed(way), **self._properties}
            self.takes_others |= way.get("additionalProperties") is True
        self._is_open = self.takes_others or not self._properties
        self.required = frozenset(
            name for name in _sequence(schema.get("required")) if isinstance(name, str)
        )

    @property
    def names(self) -> Collection[str]:
        """Declared names in schema order."""
        return self._properties.keys()

    def is_declared(self, name: str) -> bool:
        """Tell whether an argument may have this name; any name may without declarations."""
        return self._is_open or name in self._properties

    def fit(self, keys: Set[str]) -> bool:
        """Tell whether arguments with these names are complete, and all of them declared."""
        return self.required <= keys and all(map(self.is_declared, keys))

    def of(self, name: str) -> JsonTypes:
        """Return the JSON types that an argument may have."""
        found = UNKNOWN
        is_nullable = False
        for schema in self._alternatives(self._properties.get(name)):
            found |= _named_types(schema)
            is_nullable |= schema.get("nullable") is True
        return found | {"null"} if found and is_nullable else found

    def inside(self, name: str) -> "ParameterTypes":
        """Return the types of the values inside an argument: its properties, or each `item`."""
        properties: dict[str, JsonValue] = {}
        for schema in self._alternatives(self._properties.get(name)):
            if "items" in schema:
                properties.setdefault("item", schema["items"])
            for key, value in _allowed(schema).items():
                properties.setdefault(key, value)
        return ParameterTypes({"properties": properties}, self._root)

    def _alternatives(self, value: JsonValue) -> Iterator[JsonSchema]:
        """Yield a schema and those that it combines: each once, up to a limit."""
        waiting = deque([_mapping(value)])
        known: set[int] = set()
        while waiting and len(known) < _MAX_SCHEMAS:
            schema = self._resolved(waiting.popleft())
            if id(schema) in known:
                continue
            known.add(id(schema))
            yield schema
            others = chain.from_iterable(_sequence(schema.get(key)) for key in _ALTERNATIVES)
            waiting.extend(map(_mapping, islice(others, _MAX_SCHEMAS)))
            if "$ref" in schema:
                waiting.append(schema)

    def _resolved(self, schema: JsonSchema) -> JsonSchema:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
            return schema
        place: JsonValue = self._root
        for part in reference.split("/")[1:]:
            place = _mapping(place).get(part.replace("~1", "/").replace("~0", "~"))
        return _mapping(place)


# The JSON schema of arguments, or of the first of them.
_SCHEMA = sequence(
    *(fixed("{"), spaced('"')),
    maybe(
        *(Piece(r'(?P<key>[^"\\]{1,64})', r'[^"\\]{0,64}'), fixed('"'), spaced(":")),
        *(spaced("{"), spaced('"')),
    ),
    *(fixed('type"'), spaced(":"), spaced('"')),
    *(choice(*map(fixed, sorted(NOT_A_STRING | STRING))), fixed('"')),
)
_WHOLE_SCHEMA, _BEGUN_SCHEMA = re.compile(_SCHEMA.whole), re.compile(_SCHEMA.begun)


def describes_arguments(text: str, position: int, types: ParameterTypes) -> bool | None:
    """Tell whether a schema of arguments begins there, not arguments; `None` if more decides."""
    limit = position + MAX_TAG_CHARS
    if found := _WHOLE_SCHEMA.match(text, position, limit):
        if found["key"]:
            kinds = types.of(found["key"])
            return bool(kinds) and "object" not in kinds
        is_object = found[0].endswith('"object"')
        return is_object and not (types.takes_others or "type" in types.names)
    is_open = len(text) < limit and _BEGUN_SCHEMA.fullmatch(text, position)
    return None if is_open else False


def _json_type(value: object) -> str:
    """Return the JSON type of a parsed value; integers do not count as numbers."""
    return next(name for kind, name in _TYPE_NAMES if isinstance(value, kind))


def _standard(name: str) -> str:
    """Return the name of a type in JSON schemas; it may be in capitals, or of another language."""
    return _OTHER_NAMES.get(name.lower(), name.lower())


def _named_types(schema: JsonSchema) -> JsonTypes:
    """Return the types that a schema names, or implies by its allowed values."""
    match schema.get("type"):
        case str(name):
            return frozenset({_standard(name)})
        case [*names]:
            return frozenset(_standard(name) for name in names if isinstance(name, str))
    if "const" in schema:
        return frozenset({_json_type(schema["const"])})
    if values := _sequence(schema.get("enum")):
        return frozenset(map(_json_type, values))
    return frozenset(name for key, name in _MARKS.items() if key in schema)


def _allowed(schema: JsonSchema) -> JsonSchema:
    """Return the properties of one way to write an object; another way may allow others."""
    declared = _mapping(schema.get("properties"))
    return {name: part for name, part in declared.items() if part is not False}


def _mapping(value: JsonValue) -> JsonSchema:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: JsonValue) -> Iterable[JsonValue]:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return cast("Sequence[JsonValue]", value) if is_sequence else ()


_EMPTY_VALUES = (("null", "null"), ("array", "[]"), ("object", "{}"))
ESCAPED_REPLACEMENT = r"\\ufffd"
_PADDING = re.compile(r"(?<=^-)0+(?=\d)|^0+(?=\d)")
_CONSTANT = re.compile(r"true|false|null", re.IGNORECASE)


def json_string(text: str) -> str:
    """Return a text as JSON with quotes; an escaped U+FFFD replaces lone surrogates."""
    return f'"{_escaped(text)}"'


def json_text(value: object) -> str:
    """Return a value as strict JSON, or raise `ValueError` or `TypeError` if it has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return SURROGATE.sub(ESCAPED_REPLACEMENT, text)


def json_value(raw: str, types: JsonTypes) -> str:
    """Return the JSON text of a raw value with one of these types."""
    if types == STRING:
        return json_string(raw)
    is_number = types <= SCALARS and bool(types & {"integer", "number"})
    ways: list[Callable[[str], str | None]] = [_as_json, _as_literal]
    for convert in (*ways, _as_padded) if is_number else ways:
        candidate = convert(raw)
        if candidate is not None and _is_wanted(candidate, types):
            return _without_quotes(candidate, types)
    is_empty = not raw.strip() and "string" not in types
    return (is_empty and _empty_value(types)) or json_string(raw)


def agreed_types(written: JsonTypes, declared: JsonTypes) -> JsonTypes:
    """Return the types of a value that is text by its tag, or is not; a schema may refuse text."""
    return declared if declared and "string" not in declared else written


def text_value(raw: str, types: JsonTypes) -> str:
    """Return the JSON of a value that its tag calls JSON, where the schema takes only text."""
    value = json_value(raw, types)
    return value if value.startswith('"') or value == "null" else json_string(raw)


class ValueWriter:
    """Converts one value to JSON incrementally: only strings can be emitted before their end."""

    def __init__(
        self, types: JsonTypes, convert: Callable[[str, JsonTypes], str] = json_value
    ) -> None:
        """Begin a value with one of these types; `convert` reads it unless it is a string."""
        self._types = types
        self._convert = convert
        self._is_text = types == STRING
        self._raw: list[str] = []
        self._quote = '"'

    def write(self, raw: str) -> str:
        """Return the JSON that this text makes certain."""
        if not self._is_text:
            self._raw.append(raw)
            return ""
        quote, self._quote = self._quote, ""
        return quote + _escaped(raw)

    def end(self) -> str:
        """Return the rest of the value."""
        if self._is_text:
            return self._quote + '"'
        return self._convert("".join(self._raw), self._types)


def _is_wanted(text: str, types: JsonTypes) -> bool:
    """Tell whether JSON text is the value, rather than a string that looks like JSON.

    A schema without strings accepts any JSON: the tool can best report a wrong type.
    """
    found = _json_type(json.loads(text))
    if types == UNKNOWN:
        return found in ("object", "array")
    if "string" not in types:
        return True
    return found != "string" and (found in types or (found == "integer" and "number" in types))


def _without_quotes(text: str, types: JsonTypes) -> str:
    """Return the value in a JSON string, where the schema takes no text; else the JSON as it is."""
    if not text.startswith('"') or not types or not types < NOT_A_STRING:
        return text
    inner = json_value(json.loads(text), types)
    return text if inner.startswith('"') else inner


def _empty_value(types: JsonTypes) -> str:
    """Return the JSON of a value without text; empty if none of the types can be empty."""
    return next((value for name, value in _EMPTY_VALUES if name in types), "")


def _as_json(raw: str) -> str | None:
    """Return JSON as written, or `None` if it is invalid."""
    text = raw.strip()
    if _CONSTANT.fullmatch(text):
        return text.lower()
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_finite)
    except (ValueError, RecursionError):
        return None
    written = json.dumps(value, ensure_ascii=False)
    return json_text(value) if SURROGATE.search(written) else text


def _as_literal(raw: str) -> str | None:
    """Return the JSON of a Python literal, or `None` if it is invalid."""
    try:
        with warnings.catch_warnings():
            # An unknown escape in a string is harmless and deserves no warning.
            warnings.simplefilter("ignore")
            value = ast.literal_eval(raw.strip())
        if isinstance(value, tuple) and not raw.lstrip().startswith("("):
            # A number with separators, `1,000`, or a sentence.
            return None
        return _as_json(json_text(value))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _as_padded(raw: str) -> str | None:
    """Return the JSON of a number with zeros before it, `07`, or `None` if it is none."""
    return _as_json(_PADDING.sub("", raw.strip()))


def _escaped(text: str) -> str:
    return json_text(text)[1:-1]


def _finite(number: str) -> float:
    """Return a number; refuse one that overflows a float: strict parsers reject it."""
    if not is_number(number):
        raise ValueError(number)
    return float(number) if not number.lstrip("-").isdecimal() else int(number)


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which Python accepts as JSON."""
    raise ValueError(constant)


_ITEM = "item"
_TEXT = "$text"
_MAX_DEPTH = 32
_MAX_NAME_CHARS = 256


def read_elements(
    raw: str, types: JsonTypes, *, mark: str, parts: ParameterTypes, depth: int = _MAX_DEPTH
) -> str:
    """Return the JSON of a raw value, which may contain elements.

    Args:
        raw: The value as written; without complete elements it is a plain value.
        mark: The text before each tag.
        depth: Nesting limit, beyond which elements are text.
    """
    text, elements = _split(raw, mark) if depth else (raw, [])
    if not elements and depth and types and types <= {"object", "array"}:
        text, elements = _split(raw, mark, may_lack_end=True)
    if not elements:
        return json_value(raw, types)
    values = [
        (
            name,
            read_elements(
                inner, parts.of(name), mark=mark, parts=parts.inside(name), depth=depth - 1
            ),
        )
        for name, inner in elements
    ]
    is_list = "array" in types or (
        "object" not in types and {name for name, _ in values} == {_ITEM}
    )
    if is_list and not text:
        return f"[{', '.join(value for _, value in values)}]"
    return _object([(_TEXT, json_string(text)), *values] if text else values)


def _object(values: Sequence[tuple[str, str]]) -> str:
    """Return an object; elements of one name form a list."""
    by_name: dict[str, list[str]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    fields = (
        f"{json_string(name)}: {found[0] if len(found) == 1 else '[' + ', '.join(found) + ']'}"
        for name, found in by_name.items()
    )
    return f"{{{', '.join(fields)}}}"


def _split(raw: str, mark: str, *, may_lack_end: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Return the text outside elements, and the elements; no elements if tags do not match."""
    elements: list[tuple[str, str]] = []
    texts: list[str] = []
    end = 0
    while (begin := raw.find(mark, end)) >= 0:
        texts.append(raw[end:begin])
        found = _element_at(raw, begin + len(mark), mark)
        if found is None and may_lack_end:
            found = _open_element_at(raw, begin, mark)
        if found is None:
            return "", []
        name, inner, end = found
        elements.append((name, inner))
    texts.append(raw[end:])
    return "".join(texts).strip(), elements


def _element_at(raw: str, begin: int, mark: str) -> tuple[str, str, int] | None:
    """Return the name, the inside and the end of an element whose first tag follows its mark.

    A name may contain the characters of tags: the longest one with a last tag counts.
    """
    limit = raw.find(mark, begin)
    if not raw.startswith("<", begin) or limit < 0:
        return None
    begin += 1
    end = raw.rfind(">", begin, min(limit, begin + _MAX_NAME_CHARS))
    while end > begin:
        name, inner = raw[begin:end], end + 1
        last = f"{mark}</{name}>"
        place = _closing(raw, inner, f"{mark}<{name}>", last)
        if place >= 0:
            return name, raw[inner:place], place + len(last)
        end = raw.rfind(">", begin, end)
    return None


def _open_element_at(raw: str, begin: int, mark: str) -> tuple[str, str, int] | None:
    """Return the same of one without its last tag: it ends before the next of its name, if any."""
    found = re.compile(re.escape(mark) + r"<([\w.:-]+)>").match(raw, begin)
    if found is None:
        return None
    again = raw.find(found[0], found.end())
    end = again if again >= 0 else len(raw)
    inner = raw[found.end() : end]
    opened, closed = (re.findall(f"{re.escape(mark)}<{slash}([^>]+)", inner) for slash in ("", "/"))
    return None if Counter(closed) - Counter(opened) else (found[1], inner, end)


def _closing(raw: str, position: int, first: str, last: str) -> int:
    """Return the place of the last tag of an element that is open; negative if there is none."""
    place = raw.find(last, position)
    begin = raw.find(first, position)
    while 0 <= begin < place:
        place = raw.find(last, place + len(last))
        begin = raw.find(first, begin + len(first))
    return place


def continued(sent: str, value: str) -> str | None:
    """Return the text that completes the sent beginning of a JSON value; `None` if that differs."""
    if value.startswith(sent):
        return value[len(sent) :]
    parsed = json.loads(value)
    styles = product((False, True), ((", ", ": "), (",", ":"), (",", ": ")))
    written = (json.dumps(parsed, ensure_ascii=a, separators=s) for a, s in styles)
    texts = (SURROGATE.sub(ESCAPED_REPLACEMENT, text) for text in written)
    return next((text[len(sent) :] for text in texts if text.startswith(sent)), None)
