"""JSON schemas for llguidance: their keywords, limits of their size, and a stricter form.

llguidance ignores keywords that it does not know. Here those of JSON Schema that cannot be enforced
are errors, and so are misspelt ones; any other word annotates, as JSON Schema says.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any, TypeAlias
from urllib.parse import unquote

from backend.errors import GrammarError, GrammarSyntaxError
from backend.sampling.grammar.gbnf_rules import components, longest_chain, reachable
from backend.sampling.grammar.number_bounds import beyond, largest_of
from backend.sampling.grammar.schema_dialects import in_usual_keywords, is_never
from backend.sampling.grammar.schema_patterns import exact, searched
from backend.sampling.grammar.string_formats import FORMATS, with_spelled_format
from backend.sampling.grammar.writer import LarkGrammar, escaped

Schema: TypeAlias = Mapping[str, Any]
# True allows any value, false none.
AnySchema: TypeAlias = Schema | bool


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Keywords by their value: a schema, a list of schemas, or schemas by name.
_ONE = words("items additionalItems additionalProperties")
_CHOICES = words("anyOf oneOf")
_LIST = _CHOICES | words("allOf prefixItems")
_NAMED = words("properties patternProperties")
_DEFINITIONS = words("$defs definitions")
COMBINATIONS = _CHOICES | words("$ref allOf")
_GIVEN = words("const enum")
# Keywords that apply to values of one type.
IMPLIED_TYPES: Mapping[str, frozenset[str]] = {
    "object": _NAMED | words("required additionalProperties minProperties maxProperties"),
    "array": words("items prefixItems minItems maxItems"),
    "string": words("pattern format minLength maxLength"),
    "number": words("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"),
}
_RESTRICTING = words("type").union(_GIVEN, COMBINATIONS, _ONE, _LIST, *IMPLIED_TYPES.values())
_TEXTS = words("title description default examples example deprecated $comment")
ANNOTATIONS = _TEXTS | words(
    "$schema $id id $anchor readOnly writeOnly contentMediaType contentEncoding "
    "propertyOrdering markdownDescription enumDescriptions errorMessage externalDocs xml"
)
_IDS = words("$id id")
_KEYWORDS = _RESTRICTING | _DEFINITIONS | ANNOTATIONS
# Its settings would loosen the checks.
_SETTINGS = "x-guidance"
# Of JSON Schema's drafts and OpenAPI: they restrict values, and are not enforced in this form.
_LOST = words(
    "not if then else contains minContains maxContains propertyNames uniqueItems dependencies "
    "dependentRequired dependentSchemas unevaluatedProperties unevaluatedItems contentSchema "
    "$dynamicRef $recursiveRef $vocabulary nullable discriminator divisibleBy extends disallow"
) | {_SETTINGS}
# How like a keyword another word is that was meant to be it; a short one may be like it by chance.
_MISSPELT, _LONG = 0.86, 7
# From OpenAPI and Rust; they tell how a number is stored, not how it is written.
NUMBER_FORMATS = words("int32 int64 float double int8 int16 uint uint8 uint16 uint32 uint64")
# A bool is an int in Python: the order matters.
_TYPES_OF_VALUES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def type_of(value: object) -> str:
    """Return the JSON type of a value; empty for anything else."""
    return next((name for kind, name in _TYPES_OF_VALUES.items() if isinstance(value, kind)), "")


def token(name: str) -> str:
    """Return a name escaped for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def steps(pointer: str) -> list[str]:
    """Return the names in a JSON pointer."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def part_at(schema: object, pointer: str) -> Any:  # noqa: ANN401 (a part of JSON)
    """Return the part of a schema at a JSON pointer, or `None`."""
    found = schema
    for step in steps(pointer):
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def string_terminals(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the terminals that a string must match.

    Raises:
        PatternError: llguidance does not support the pattern.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.){{{least},{most}}}/"
    if schema.get("format") in FORMATS:
        yield f"/{FORMATS[schema['format']]}/"
    if "pattern" in schema:
        yield f"/{searched(schema['pattern'])}/"


@cache
def _without_tags(tags: tuple[str, ...]) -> str:
    """Return a pattern of text without these tags, each of which starts with its only "<"."""
    begun, left = _prefixes(tags), []
    for prefix in begun:
        following = {tag[len(prefix)] for tag in tags if tag.startswith(prefix)}
        left.append(f"{escaped(prefix)}[^<{''.join(map(escaped, sorted(following)))}]")
    some = f"(?:{'|'.join(map(escaped, begun))})*"
    return f"^(?:[^<]|{some}(?:{'|'.join(left)}))*{some}$"


def _prefixes(tags: tuple[str, ...]) -> list[str]:
    """Return the possible beginnings of these tags, without any complete tag."""
    prefixes = {tag[:length] for tag in tags for length in range(1, len(tag))}
    return sorted(prefix for prefix in prefixes if not prefix.startswith(tags))


@dataclass(frozen=True, slots=True)
class _SchemaTree:
    """All subschemas, by JSON pointer.

    Attributes:
        edges: Pointers to the parts of a subschema, and to the target of its `$ref`.
            Definitions are not parts.
    """

    schemas: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    edges: dict[str, list[str]] = field(default_factory=dict)


def walk(schema: Mapping[str, Any]) -> _SchemaTree:
    """Return the subschemas.

    Raises:
        GrammarError: A keyword is unsupported or unknown; the message says where.
    """
    tree = _SchemaTree()
    pending: list[tuple[str, object]] = [("#", schema)]
    while pending:
        pointer, subschema = pending.pop()
        if not isinstance(subschema, dict | bool):
            raise GrammarError(f"{pointer}: a schema is an object or a boolean")
        fields = subschema if isinstance(subschema, dict) else {}
        _require_supported(pointer, fields)
        parts = list(_parts(pointer, fields))
        tree.schemas[pointer] = fields
        tree.edges[pointer] = [part for part, _, is_definition in parts if not is_definition]
        pending += [(part, value) for part, value, _ in parts]
    for pointer, known in tree.schemas.items():
        if "$ref" in known:
            tree.edges[pointer].append(_target(pointer, known["$ref"], tree))
    return tree


def _require_supported(pointer: str, fields: Mapping[str, Any]) -> None:
    for keyword in (name for name in fields if name not in _KEYWORDS):
        meant = _meant(keyword)
        hint = f": did you mean {meant!r}?" if meant != keyword else ""
        raise GrammarError(f"{pointer}: the keyword {keyword!r} is not supported{hint}")
    if fields.get("enum") == []:
        raise GrammarError(f"{pointer}/enum: is empty: it allows no value")
    known = fields.get("format", "uuid")
    if not isinstance(known, str) or known not in FORMATS:
        raise GrammarError(f"{pointer}: the format {known!r} is not supported")


def _meant(word: str) -> str:
    """Return the restricting keyword that a word is, or is a misspelling of; empty for others."""
    if word in _RESTRICTING | _LOST:
        return word
    known = [each for each in sorted(_RESTRICTING | _LOST) if len(each) >= _LONG]
    is_like = len(word) >= _LONG and word.isalpha()
    return next(iter(get_close_matches(word, known, 1, _MISSPELT)), "") if is_like else ""


def _require_numbers(tree: _SchemaTree) -> None:
    """Refuse bounds that no number meets.

    Raises:
        GrammarError: There is one; the message says where.
    """
    for pointer, fields in tree.schemas.items():
        if keyword := beyond(fields):
            largest = largest_of(fields)
            raise GrammarError(f"{pointer}/{keyword}: numbers end at {largest} and -{largest}")


def _parts(pointer: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, object, bool]]:
    """Yield the parts of a subschema: pointer, value, and whether it is only a definition."""
    for keyword, value in fields.items():
        here = f"{pointer}/{keyword}"
        if keyword in _LIST or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise GrammarError(f"{here}: must be a list of schemas")
            yield from ((f"{here}/{index}", part, False) for index, part in enumerate(value))
        elif keyword in _ONE:
            yield here, value, False
        elif keyword in _NAMED | _DEFINITIONS:
            if not isinstance(value, dict):
                raise GrammarError(f"{here}: must be an object with schemas")
            is_definition = keyword in _DEFINITIONS
            yield from ((f"{here}/{token(k)}", part, is_definition) for k, part in value.items())


def _target(pointer: str, reference: object, tree: _SchemaTree) -> str:
    """Return the pointer that a reference denotes, which must lead to a subschema."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        raise GrammarError(f"{pointer}: $ref must point into the schema itself, as '#/...'")
    target = unquote(reference)
    if target not in tree.schemas:
        raise GrammarError(f"{pointer}: there is no schema at {reference!r}")
    return target


MAX_SCHEMAS = 10_000
MAX_REFERENCES = 500
MAX_LEVELS = 4000
# Optional properties cost their number squared; pattern properties too, and far more.
MAX_OPTIONAL_COST = 1_000_000
MAX_PATTERN_PROPERTIES = 64
# Patterns that must all match cost two to the power of their number.
MAX_COMBINED_PATTERNS = 10
# A multiple costs its significant digits, read as a number.
MAX_MULTIPLES = 20_000


def _require_ends(tree: _SchemaTree) -> None:
    """Refuse a part whose values hold such a value again: a reply that begins one cannot go on.

    Raises:
        GrammarError: There is one; the message says where.
    """
    ended: set[str] = set()
    meant = reachable(["#"], tree.edges)
    for component in components(tree.edges):
        # In a pointer's part there are more steps.
        left = sorted(meant.intersection(component), key=len, reverse=True)
        while left:
            before = len(left)
            left = [pointer for pointer in left if not _ends(pointer, tree, ended)]
            if len(left) == before:
                raise GrammarError(f"{left[-1]}: no text can complete it")


def _ends(pointer: str, tree: _SchemaTree, ended: set[str]) -> bool:
    """Return whether a schema allows a value, if of the others at least these do; note it too."""
    fields = tree.schemas[pointer]
    choices = [
        [f"{pointer}/{keyword}/{index}" for index in range(len(fields[keyword]))]
        for keyword in _CHOICES & fields.keys()
    ]
    does_end = bool(_GIVEN & fields.keys()) or (
        all(part in ended or part not in tree.schemas for part in _needed(pointer, tree))
        and all(any(part in ended for part in parts) for parts in choices if parts)
    )
    ended |= {pointer} if does_end else set()
    return does_end


def _needed(pointer: str, tree: _SchemaTree) -> Iterator[str]:
    """Yield the parts that each value of a schema matches or holds; some do not exist."""
    fields = tree.schemas[pointer]
    if "$ref" in fields:
        yield _target(pointer, fields["$ref"], tree)
    yield from (f"{pointer}/allOf/{index}" for index in range(len(fields.get("allOf", ()))))
    required, least = fields.get("required"), fields.get("minItems")
    if fields.get("type") == "object" and isinstance(required, list):
        yield from (f"{pointer}/properties/{token(str(name))}" for name in required)
    if fields.get("type") == "array" and isinstance(least, int):
        first = len(fields.get("prefixItems", ()))
        yield from (f"{pointer}/prefixItems/{index}" for index in range(min(first, least)))
        yield from [f"{pointer}/items"] * (least > first)


_CONSTRAINING = words(
    "properties patternProperties additionalProperties items prefixItems const enum pattern format "
    "multipleOf minLength maxLength"
)


def require_bounded(tree: _SchemaTree) -> None:
    """Refuse a schema that would crash llguidance or keep it busy for long.

    Raises:
        GrammarError: The schema is too large in some respect.
    """
    schemas = tree.schemas
    if len(schemas) > MAX_SCHEMAS:
        raise GrammarError(f"there are more than {MAX_SCHEMAS} schemas in the schema")
    references = {pointer: int("$ref" in fields) for pointer, fields in schemas.items()}
    if longest_chain(tree.edges, references) > MAX_REFERENCES:
        raise GrammarError(f"references lead to references more than {MAX_REFERENCES} deep")
    if longest_chain(tree.edges, dict.fromkeys(schemas, 1)) > MAX_LEVELS:
        raise GrammarError(f"schemas nest more than {MAX_LEVELS} deep")
    _require_ends(tree)
    if sum(_optional_properties(fields) ** 2 for fields in schemas.values()) > MAX_OPTIONAL_COST:
        raise GrammarError("there are too many optional properties")
    patterns = sum(len(fields.get("patternProperties", {})) for fields in schemas.values())
    if patterns > MAX_PATTERN_PROPERTIES:
        raise GrammarError(f"there are more than {MAX_PATTERN_PROPERTIES} pattern properties")
    _require_cheap_combinations(tree)
    if sum(_multiples(schemas.values())) > MAX_MULTIPLES:
        raise GrammarError("the values of 'multipleOf' are too large")


def _combined(tree: _SchemaTree) -> list[Mapping[str, Any]]:
    """Return the subschemas that may apply to one value together with others."""
    combining = [pointer for pointer, fields in tree.schemas.items() if _combines(fields)]
    return [tree.schemas[pointer] for pointer in reachable(combining, tree.edges)]


def _require_cheap_combinations(tree: _SchemaTree) -> None:
    """Limit the conditions that may apply to one value."""
    combined = _combined(tree)
    patterns = {str(fields["pattern"]) for fields in combined if "pattern" in fields}
    if len(patterns) > MAX_COMBINED_PATTERNS:
        raise GrammarError(f"more than {MAX_COMBINED_PATTERNS} patterns are combined")
    product = 1
    for multiple in _multiples(combined):
        product *= max(multiple, 1)
    if product > MAX_MULTIPLES:
        raise GrammarError("the combined values of 'multipleOf' are too large")


def _combines(fields: Mapping[str, Any]) -> bool:
    """Return whether several parts of a schema constrain the same value."""
    combining = sum(keyword in fields for keyword in COMBINATIONS)
    constrains = any(keyword in fields for keyword in _CONSTRAINING)
    return combining + constrains > 1 or len(fields.get("allOf", ())) > 1


def _optional_properties(fields: Mapping[str, Any]) -> int:
    required = fields.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    return len(fields.get("properties", {}).keys() - names)


def _multiples(schemas: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the significant digits of all multiples: 75 for 750 and for 0.75."""
    values = (fields.get("multipleOf") for fields in schemas)
    digits = {Decimal(str(v)).as_tuple().digits for v in values if isinstance(v, int | float)}
    return {int("".join(map(str, number)).rstrip("0") or "0") for number in digits}


_FINEST = 1e-9
_NUMERIC = frozenset({"integer", "number"})
_BOUNDS = words("minimum maximum exclusiveMinimum exclusiveMaximum")
_KEYS = _NAMED | {"additionalProperties"}
_DEFS = "$defs"
_ANY = "x-any-value"
_ANY_VALUE: Schema = {"$ref": f"#/{_DEFS}/{_ANY}"}
_ANY_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


def tightened(schema: Schema, forbidden: tuple[str, ...] = ()) -> Schema:
    """Return a slightly stricter schema.

    Args:
        schema: A complete schema, with the definitions that it refers to.
        forbidden: Tags that no string or key contains; each starts with its only "<".
    """
    tight = _Tightening(forbidden)
    return tight.with_any_value(tight.whole(schema))


def _with_short_numbers(schema: Schema, tree: _SchemaTree) -> Schema:
    """Return a schema whose integers, numbers with bounds and values of any type are not endless.

    Combinations of schemas are left as they are.
    """
    opening = _Opening(_combined(tree))
    return opening.with_any_value(opening.part(schema))


def type_names(schema: Schema) -> frozenset[str]:
    """Return the names in a schema's `type`, which may be a list or missing."""
    value = schema.get("type", [])
    return frozenset([value] if isinstance(value, str) else value)


def _changed(keyword: str, value: object, change: Callable[[AnySchema], AnySchema]) -> object:
    """Return the value of a keyword, with the schemas that it holds changed."""
    if keyword in _LIST | {"items"} and isinstance(value, list):
        return [change(part) if isinstance(part, Mapping | bool) else part for part in value]
    if keyword in _NAMED | _DEFINITIONS and isinstance(value, Mapping):
        return {
            name: change(part) if isinstance(part, Mapping | bool) else part
            for name, part in value.items()
        }
    if keyword in _ONE and isinstance(value, Mapping | bool):
        return change(value)
    return value


def _with_parts(schema: Schema, change: Callable[[Schema], AnySchema]) -> dict[str, Any]:
    """Return a schema with its parts changed that are more than true or false."""

    def part(part: AnySchema) -> AnySchema:
        return part if isinstance(part, bool) else change(part)

    return {key: _changed(key, value, part) for key, value in schema.items()}


def _usual(root: Schema) -> Schema:
    """Return a schema in usual keywords, to the last of its parts.

    Schemas to which references lead, under words that annotate, become definitions.
    """
    places, names = _places(root), dict[str, str]()

    def find(reference: object) -> object:
        is_inside = isinstance(reference, str) and reference.startswith("#")
        return part_at(root, unquote(str(reference))) if is_inside else None

    def place(reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return reference
        target = unquote(reference)
        around, _, last = target.rpartition("/")
        is_known = target in places or (around in places and last in _KEYWORDS)
        if is_known or not isinstance(find(reference), Mapping | bool):
            return reference
        return f"#/{_DEFS}/{names.setdefault(reference, f'x-part-{len(names)}')}"

    def usual(schema: Schema) -> dict[str, Any]:
        known = {key: value for key, value in schema.items() if key in _KEYWORDS or _meant(key)}
        fields = _with_parts(in_usual_keywords(known, find), part)
        return {**fields, "$ref": place(fields["$ref"])} if "$ref" in fields else fields

    def part(schema: Schema) -> AnySchema:
        # References begin at the root, whatever a part is called.
        unnamed = {key: value for key, value in schema.items() if key not in _IDS}
        return not is_never(schema) and usual(unnamed)

    whole, moved = usual(root), dict[str, AnySchema]()
    while left := [reference for reference in names if names[reference] not in moved]:
        for reference in left:
            found = find(reference)
            moved[names[reference]] = part(found) if isinstance(found, Mapping) else bool(found)
    return {**whole, _DEFS: {**whole.get(_DEFS, {}), **moved}} if moved else whole


def _places(root: Schema) -> set[str]:
    """Return the pointers to the parts of a schema, itself included."""
    found, pending = set[str](), [("#", root)]
    while pending:
        pointer, fields = pending.pop()
        found.add(pointer)
        for place, part, _ in _parts(pointer, fields):
            found.add(place)
            pending += [(place, part)] if isinstance(part, Mapping) else []
    return found


class _Tightening:
    """Copies a schema while making it stricter."""

    def __init__(self, forbidden: tuple[str, ...]) -> None:
        self._pattern = _without_tags(forbidden) if forbidden else ""
        self._has_any_value = False

    def with_any_value(self, root: Schema) -> Schema:
        """Return the copy with the definition of any value, if it refers to it."""
        if not self._has_any_value:
            return root
        any_value = {"anyOf": [_Tightening.whole(self, {"type": name}) for name in _ANY_TYPES]}
        return {**root, _DEFS: {**root.get(_DEFS, {}), _ANY: any_value}}

    def schema(self, schema: AnySchema) -> AnySchema:
        if schema is False:
            return False
        if schema is True or schema.keys() <= _TEXTS:
            return self._any_value()
        return self.whole(schema)

    def whole(self, schema: Schema) -> dict[str, Any]:
        names = type_names(schema)
        # The parts of a combination apply together: none of them may be closed.
        is_alone = not (names or _KEYS & schema.keys())
        tight = {
            keyword: value if keyword in _CHOICES and not is_alone else self._part(keyword, value)
            for keyword, value in schema.items()
        }
        if _GIVEN & tight.keys():
            return tight
        if names & _NUMERIC:
            _bound(tight, is_fractional="number" in names)
        if "array" in names and not {"items", "prefixItems"} & tight.keys():
            tight["items"] = self._any_value()
        if "object" in names and not COMBINATIONS & tight.keys():
            self._restrict_keys(tight)
        if "string" in names and self._pattern:
            self._restrict_text(tight)
        return with_spelled_format(tight)

    def _part(self, keyword: str, value: object) -> object:
        # The parts of `allOf` apply together: none of them may be closed.
        return value if keyword == "allOf" else _changed(keyword, value, self.schema)

    def _any_value(self) -> Schema:
        self._has_any_value = True
        return _ANY_VALUE

    def _restrict_keys(self, tight: dict[str, Any]) -> None:
        """Close an object that declares its keys; others allow any keys without tags."""
        if "patternProperties" in tight:
            return
        if "additionalProperties" not in tight:
            tight["additionalProperties"] = not tight.get("properties") and self._any_value()
        others = tight["additionalProperties"]
        if self._pattern and others is not False:
            tight["patternProperties"] = {self._pattern: others}
            tight["additionalProperties"] = False

    def _restrict_text(self, tight: dict[str, Any]) -> None:
        if "pattern" in tight:
            tight["allOf"] = [*tight.get("allOf", ()), {"pattern": self._pattern}]
        elif "format" not in tight:
            tight["pattern"] = self._pattern


class _Opening(_Tightening):
    """Copies a schema while it bounds numbers, and spells out where any value is allowed."""

    def __init__(self, combined: Sequence[Schema]) -> None:
        """Begin with the parts that are combined with others, which stay as they are.

        llguidance cannot combine the definition of any value, which holds itself, with itself.
        """
        super().__init__(())
        self._combined = frozenset(map(id, combined))

    def schema(self, schema: AnySchema) -> AnySchema:
        if isinstance(schema, bool):
            return self._any_value() if schema else False
        return self.part(schema)

    def part(self, schema: Schema) -> Schema:
        if id(schema) in self._combined:
            return _with_spelled_formats(schema)
        if not _RESTRICTING & schema.keys():
            return {**schema, **self._any_value()}
        return self.whole(schema)

    def whole(self, schema: Schema) -> dict[str, Any]:
        copy = {keyword: self._part(keyword, value) for keyword, value in schema.items()}
        copy, names = with_spelled_format(copy), type_names(schema)
        if (_GIVEN | COMBINATIONS) & copy.keys():
            return copy
        ends = [copy[keyword] for keyword in _BOUNDS & copy.keys()]
        is_fractional = "number" in names
        # A number without bounds may have an exponent, which llguidance has nowhere else.
        if names & _NUMERIC and (ends or not is_fractional) and all(map(_is_usual_end, ends)):
            _bound(copy, is_fractional=is_fractional)
        if "array" in names and not {"items", "prefixItems"} & copy.keys():
            copy["items"] = self._any_value()
        if "object" in names:
            copy.setdefault("additionalProperties", self._any_value())
        return copy


def _with_spelled_formats(schema: Schema) -> dict[str, Any]:
    return with_spelled_format(_with_parts(schema, _with_spelled_formats))


def _is_usual_end(value: object) -> bool:
    """Return whether numbers with few decimals can be compared with a bound; others are refused."""
    return isinstance(value, int | float) and (not value or abs(value) >= _FINEST)


def _bound(tight: dict[str, Any], *, is_fractional: bool) -> None:
    """Limit the digits of a number."""
    largest = largest_of(tight)
    if not {"minimum", "exclusiveMinimum"} & tight.keys():
        tight["minimum"] = min(-largest, tight.get("maximum", 0))
    if not {"maximum", "exclusiveMaximum"} & tight.keys():
        tight["maximum"] = max(largest, tight.get("minimum", 0))
    if is_fractional:
        tight.setdefault("multipleOf", _FINEST)


MAX_NESTING = 120

SETTINGS = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    # Models write "\\u00e9" as well as "é".
    "json_allow_general_unicode_escapes": True,
}


def schema_to_lark(text: str) -> LarkGrammar:
    """Return the grammar of the JSON values allowed by a schema.

    Raises:
        GrammarError: The text is not a schema, or cannot be enforced.
    """
    parsed = _parsed(text)
    schema = _usual(parsed)
    if parsed and not schema.keys() - ANNOTATIONS and not parsed.keys() <= _KEYWORDS:
        unknown = next(word for word in parsed if word not in _KEYWORDS)
        raise GrammarError(f"#: the keyword {unknown!r} is not supported, and no other restricts")
    tree = walk(schema)
    _require_numbers(tree)
    require_bounded(tree)
    return LarkGrammar(json_rule(_with_short_numbers(schema, tree), SETTINGS))


# Each is tried, which takes milliseconds.
_MAX_TRIED = 64
_OF_TEXTS = (words("pattern"), words("format"), words("minLength maxLength"))


def require_texts(text: str, check: Callable[[LarkGrammar], None]) -> None:
    """Require that some text meets all conditions of each string: llguidance leaves out others.

    Raises:
        GrammarError: Conditions of a string contradict each other; the message says where.
    """
    schema = _usual(_parsed(text))
    strings = (
        (pointer, fields)
        for pointer, fields in walk(schema).schemas.items()
        if sum(bool(keywords & fields.keys()) for keywords in _OF_TEXTS) > 1
    )
    for pointer, fields in islice(strings, _MAX_TRIED):
        alone = {key: value for key, value in fields.items() if key in IMPLIED_TYPES["string"]}
        try:
            check(
                LarkGrammar(json_rule(with_spelled_format({**alone, "type": "string"}), SETTINGS))
            )
        except GrammarError as error:
            raise GrammarError(f"{pointer}: {error.problem}") from error


def placed(text: str, refusal: GrammarError, check: Callable[[LarkGrammar], None]) -> GrammarError:
    """Return the refusal of a schema with its place: the innermost part that is refused alone."""
    schema = _usual(_parsed(text))
    tree = walk(schema)
    shared = {keyword: schema[keyword] for keyword in _DEFINITIONS & schema.keys()}
    place, seen, left = "#", {"#"}, list(tree.edges["#"])
    while left and len(seen) < _MAX_TRIED:
        part = left.pop()
        if part in seen:
            continue
        seen.add(part)
        try:
            check(LarkGrammar(json_rule({**tree.schemas[part], **shared}, SETTINGS)))
        except GrammarError as inner:
            place, refusal, left = part, inner, list(tree.edges[part])
    return GrammarError(f"{place}: {refusal.problem}")


def json_rule(schema: Schema, settings: Mapping[str, object]) -> str:
    """Return the expression of the JSON values that a complete schema allows."""
    return "%json " + json.dumps({**_with_exact_classes(schema), _SETTINGS: settings})


def _with_exact_classes(schema: Schema) -> Schema:
    fields = _with_parts(schema, _with_exact_classes)
    if isinstance(pattern := fields.get("pattern"), str):
        fields["pattern"] = exact(pattern)
    if isinstance(keys := fields.get("patternProperties"), Mapping):
        fields["patternProperties"] = {exact(pattern): part for pattern, part in keys.items()}
    return fields


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarSyntaxError(error.lineno, error.colno, f"not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise GrammarError(
            "this JSON cannot be read: it nests too deep, or has a huge number"
        ) from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object, or true")
    if _nesting(schema) > MAX_NESTING:
        raise GrammarError(f"the JSON schema nests more than {MAX_NESTING} deep")
    return schema


def _nesting(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        lists = [
            v if isinstance(v, list) else list(v.values())
            for v in level
            if isinstance(v, list | dict)
        ]
        level = [inner for values in lists for inner in values]
    return depth
