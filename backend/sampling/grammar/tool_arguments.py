"""The arguments of calls: literals of a programming language, values in tags, or JSON."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from backend.formats.closing import Limits, TagEnds, bracket_limits, quote_limits
from backend.formats.dialects import (
    KEY,
    MAYBE_LINE,
    TYPE,
    VALUE,
    Dialect,
    Literals,
    Tags,
    Template,
    split_at,
    text_of,
)
from backend.sampling.grammar.schema import (
    IMPLIED_TYPES,
    AnySchema,
    Schema,
    string_terminals,
)
from backend.sampling.grammar.schema_patterns import PatternError
from backend.sampling.grammar.tool_parameters import (
    OF_ARRAYS,
    Kind,
    Parameters,
    Property,
    arguments,
    groups,
    kinds,
    properties,
)
from backend.sampling.grammar.tool_values import (
    CallSite,
    Ending,
    RawText,
    fill,
    json_arguments,
    json_in_any_order,
    json_list,
    json_part,
    json_text,
    json_value,
    members_in,
)
from backend.sampling.grammar.writer import (
    ALWAYS,
    NONE_SET,
    GrammarWriter,
    alternatives,
    chain,
    escaped,
    quoted,
    repeated,
    sequence,
    when,
)

_UNQUOTED = frozenset("'\\")
# In an object, where the schema does not tell the reader which keys to expect.
_BARE_KEY = re.compile(r"""[^:,<>"'{}\[\]\\]+""")


@dataclass(frozen=True, slots=True)
class _RawStrings:
    """Raw text in the format's own quotes, and bare keys."""

    quote: str
    writer: GrammarWriter

    def string(self, _schema: Schema, conditions: Iterable[str], limits: Limits) -> str:
        """Return the expression of strings that meet conditions, raw ones within the limits."""
        quote = self.writer.pieces(self.quote)
        if not any(isinstance(piece, int) for piece in quote):
            limits = Limits(inside=((self.quote,),))
        text = RawText.of(limits, self.writer.vocabulary, conditions, ())
        first, *others = quote
        return chain(sequence(quote), text.before(Ending(first, sequence(others)), self.writer))

    def constant(self, text: str) -> str:
        """Return the expression of one string; one with a quote in it is written as JSON."""
        if self.quote in text:
            return quoted(json_text(text))
        quote = self.writer.pieces(self.quote)
        return sequence([*quote, text, *quote])

    def key(self, name: str) -> str:
        is_bare = _BARE_KEY.fullmatch(name) and name == name.strip()
        return quoted(name) if is_bare else self.constant(name)

    def any_key(self) -> str:
        return self.writer.terminal("/[A-Za-z_][A-Za-z0-9_-]*/")


@dataclass(frozen=True, slots=True)
class _PythonStrings:
    """Strings in double quotes, with escapes common to JSON and Python, or in single quotes."""

    writer: GrammarWriter

    def string(self, schema: Schema, conditions: Iterable[str], _limits: Limits) -> str:
        required = list(conditions)
        plain = " & ".join([r"/[^'\\]*/", *required])
        escapes = r"""/([^'\\]|\\['\x22\\nrt])*/"""
        single = f'"\'" ({plain if required else escapes}) "\'"'
        return alternatives([self.writer.rule(json_value(schema)), self.writer.terminal(single)])

    def constant(self, text: str) -> str:
        return alternatives(_quotations(text))

    def key(self, name: str) -> str:
        return alternatives(_quotations(name))

    def any_key(self) -> str:
        return self.writer.rule(json_value({"type": "string"}))


def _strings_of(dialect: Literals, writer: GrammarWriter) -> _RawStrings | _PythonStrings:
    """Return the way in which a dialect writes strings."""
    if dialect.has_escapes:
        return _PythonStrings(writer)
    return _RawStrings(dialect.quotes[0], writer)


def _quotations(text: str) -> Iterator[str]:
    yield quoted(json_text(text))
    if not _UNQUOTED & {*text}:
        yield quoted(f"'{text}'")


def _literal_arguments(
    dialect: Literals, site: CallSite, parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments as named literals, and of the text after them.

    Raises:
        GrammarError: A parameter cannot be enforced; the message says which.
    """
    after = sequence(fill(site.after, {}, writer))
    return chain(_Literals(dialect, site, parameters, writer).arguments(), after)


class _Literals:
    """Writes the expressions of one tool's values."""

    def __init__(
        self, dialect: Literals, site: CallSite, parameters: Parameters, writer: GrammarWriter
    ) -> None:
        self._dialect = dialect
        self._strings = _strings_of(dialect, writer)
        self._reading = site.reading
        self._limits = quote_limits(dialect, site.reading, site.opener)
        self._assign = text_of(dialect.argument)
        self._parameters = parameters
        self._writer = writer

    def arguments(self) -> str:
        # A comma and a key are one terminal: only the key tells readers that a string has ended.
        return alternatives(
            self._members(
                kind, lambda comma, name: quoted(comma + name + self._assign), self._limits
            )
            for kind in arguments(self._parameters)
        )

    def _members(self, kind: Kind, begin: Callable[[str, str], str], limits: Limits) -> str:
        """Return the expression of an object's properties, separated by commas."""
        found = properties(kind, self._parameters)
        if self._dialect.sorts_names:
            found.sort(key=lambda item: item.name.lower())
        values = {
            item.name: self._writer.rule(self._value(item.pointer, item.schema, limits))
            for item in found
        }

        def member(comma: str, item: Property) -> str:
            return chain(begin(comma, item.name), values[item.name])

        comma = self._dialect.comma
        return members_in(found, partial(member, ""), partial(member, comma), self._writer)

    def _value(self, pointer: str, schema: AnySchema, limits: Limits) -> str:
        found = kinds(pointer, schema, self._parameters)
        return alternatives(expression for kind in found for expression in self._ways(kind, limits))

    def _ways(self, kind: Kind, limits: Limits) -> Iterator[str]:
        if "const" in kind.schema:
            yield self._constant(kind.schema["const"])
            return
        match sorted(kind.types):
            case ["string"]:
                yield self._string(kind, limits)
            case ["integer" | "number"]:
                self._require_only(kind, IMPLIED_TYPES["number"])
                yield self._writer.rule(json_part(kind.schema, self._parameters))
            case ["boolean"]:
                yield self._spelled("true", "false")
            case ["null"]:
                yield self._spelled("null")
            case ["array"]:
                self._require_only(kind, OF_ARRAYS)
                yield self._recursive(kind, self._array)
            case ["object"]:
                yield self._recursive(kind, self._object)
            case _:
                self._require_only(kind, ())
                yield self._any_value(limits)

    def _recursive(self, kind: Kind, body: Callable[[Kind], str]) -> str:
        key = f"{self._parameters.tool} {kind.pointer} {min(kind.types)}"
        return self._writer.recursive_rule(key, lambda: body(kind))

    def _string(self, kind: Kind, limits: Limits) -> str:
        self._require_only(kind, IMPLIED_TYPES["string"])
        conditions = _conditions(kind, self._parameters)
        return self._strings.string(kind.schema, conditions, limits)

    def _array(self, kind: Kind) -> str:
        item = self._value(
            f"{kind.pointer}/items", kind.schema.get("items", True), self._inside("]")
        )
        least, most = kind.schema.get("minItems", 0), kind.schema.get("maxItems")
        return json_list(item, least, most, self._dialect.comma)

    def _object(self, kind: Kind) -> str:
        others = kind.schema.get("additionalProperties", True)
        if not kind.schema.get("properties") and others is not False:
            self._require_only(kind, ("properties", "additionalProperties"))
            pointer = f"{kind.pointer}/additionalProperties"
            return self._any_object(self._value(pointer, others, self._inside("}")))
        members = self._members(
            kind, lambda comma, name: chain(quoted(comma), self._key(name)), self._inside("}")
        )
        return chain(quoted("{"), members, quoted("}"))

    def _inside(self, bracket: str) -> Limits:
        return bracket_limits(self._dialect, self._reading, bracket)

    def _key(self, name: str) -> str:
        return chain(self._strings.key(name), quoted(self._dialect.colon))

    def _any_object(self, value: str) -> str:
        """Return the expression of an object with arbitrary keys."""
        member = chain(self._strings.any_key(), quoted(self._dialect.colon), value)
        members = chain(member, repeated(chain(quoted(self._dialect.comma), member), 0, None))
        return chain(quoted("{"), repeated(members, 0, 1), quoted("}"))

    def _any_value(self, limits: Limits) -> str:
        return self._writer.recursive_rule(
            f"any value {limits}", lambda: alternatives(self._any_ways(limits))
        )

    def _any_ways(self, limits: Limits) -> Iterator[str]:
        yield self._strings.string({"type": "string"}, (), limits)
        yield self._writer.rule(json_value({"type": "number"}))
        yield self._spelled("true", "false", "null")
        yield json_list(self._any_value(self._inside("]")), comma=self._dialect.comma)
        yield self._any_object(self._any_value(self._inside("}")))

    def _spelled(self, *constants: str) -> str:
        ways = [quoted(way) for constant in constants for way in self._dialect.constants[constant]]
        return alternatives(ways)

    def _constant(self, value: object) -> str:
        comma = quoted(self._dialect.comma)
        match value:
            case str():
                return self._strings.constant(value)
            case list():
                return chain(quoted("["), _joined(comma, map(self._constant, value)), quoted("]"))
            case dict():
                members = (chain(self._key(key), self._constant(v)) for key, v in value.items())
                return chain(quoted("{"), _joined(comma, members), quoted("}"))
        text = json_text(value)
        return self._spelled(text) if text in self._dialect.constants else quoted(text)

    def _require_only(self, kind: Kind, keywords: Collection[str]) -> None:
        self._parameters.require_only(kind, keywords, "in this format")


def _conditions(kind: Kind, parameters: Parameters) -> list[str]:
    """Return terminals that a string must all match."""
    try:
        return list(string_terminals(kind.schema))
    except PatternError as error:
        raise parameters.error(f"{kind.pointer}/pattern", str(error)) from error


def _joined(separator: str, expressions: Iterator[str]) -> str:
    return f" {separator} ".join(expressions)


_SPACE = r"[\s\x1C-\x1F\\]*"
_SIGNS = r"[-+.(\s\x1C-\x1F\\]*"
_NUMBER = rf"{_SIGNS}[0-9](?s:.*)"
# Texts that a reader takes for a value of the type rather than for a string.
_LOOKS = {
    "null": rf"{_SPACE}((?i:null)|None){_SPACE}",
    "boolean": rf"{_SPACE}(?i:true|false){_SPACE}",
    "integer": _NUMBER,
    "number": _NUMBER,
    "object": rf"{_SIGNS}\{{(?s:.*)",
    "array": rf"{_SIGNS}([0-9\[{{(]|[uUrR]?[\x22']|(True|False|None)[\s,])(?s:.*)",
}
_ARRAY = frozenset({"array"})
_NESTED = (_ARRAY, frozenset({"object"}))
# Templates in which a value is written by Python's `str` teach its booleans.
_CONSTANTS = {"null": ("null",), "boolean": ("true", "false", "True", "False")}
_BOOLEAN = frozenset({"boolean"})


def _tagged_arguments(
    dialect: Tags, site: CallSite, parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments in tags, and of the text after them.

    Raises:
        PartError: A parameter cannot be enforced.
    """
    return alternatives(
        _Arguments(kind, dialect, site, parameters, writer).write()
        for kind in arguments(parameters)
    )


class _Arguments:
    """Writes the expressions of the arguments of a call.

    The end of a value is written together with the beginning of the text after it: only there are
    readers certain of it.
    """

    def __init__(
        self,
        kind: Kind,
        dialect: Tags,
        site: CallSite,
        parameters: Parameters,
        writer: GrammarWriter,
    ) -> None:
        self._items = properties(kind, parameters)
        self._groups = groups(self._items)
        self._dialect = dialect
        self._site = site
        self._ends = TagEnds.of(site.reading, dialect)
        limits = self._ends.limits(dialect, site.opener, site.after)
        self._limits = replace(limits, inside=(*limits.inside, *site.foreign))
        (start, *begin), end = split_at(dialect.parameter, VALUE)
        self._start, self._begin = str(start), tuple(begin)
        written = text_of(end)
        before, mark, tail = written.partition(self._ends.ends[0] or written)
        first, *others = writer.pieces(before + mark)
        # The text after it is not part of an argument, which is written once therefore.
        self._ending = Ending(first, "")
        lines = ("", "\n") if MAYBE_LINE in end else ("",)
        after = text_of(site.after)
        self._to_next, self._to_end = (
            [sequence([*others, *writer.pieces(tail + line + then)]) for line in lines]
            for then in (self._start, after)
        )
        self._parameters = parameters
        self._writer = writer
        self._key = f"{parameters.tool} {kind.pointer} {site}"
        self._begun: dict[str, str] = {}

    def write(self) -> str:
        after = self._written(self._site.after)
        if self._dialect.mark:
            return chain(members_in(self._items, self._element, self._element, self._writer), after)
        ways = [after] * self._may_end(0)
        if self._groups:
            begun = f"{self._started(0)}::{NONE_SET}"
            ways.insert(0, chain(self._written((self._start,)), begun))
        return alternatives(ways)

    def _may_end(self, number: int) -> bool:
        """Tell whether groups from a number on need no argument."""
        return not any(group.required for group in self._groups[number:])

    def _element(self, item: Property) -> str:
        """Return the expression of an argument that no other text looks like."""
        if item.name not in self._begun:
            self._begun[item.name] = self._writer.rule(self._argument(item).element())
        return self._begun[item.name]

    def _started(self, number: int) -> str:
        """Return the rule of the arguments from a group on, after the beginning of one."""
        return self._writer.rule_of_bits(
            f"{self._key} from {number}", lambda: " | ".join(self._ways_from(number))
        )

    def _ways_from(self, number: int) -> Iterator[str]:
        group = self._groups[number]
        for bit, item in enumerate(group.items):
            if item.name not in self._begun:
                self._begun[item.name] = self._argument(item).write(self._begin, self._ending)
            after = f"{self._rest(number)}::set_bit({bit})"
            yield when(chain(self._begun[item.name], after), f"bit_clear({bit})")
        if number + 1 < len(self._groups):
            yield when(f"{self._started(number + 1)}::{NONE_SET}", group.is_complete)

    def _argument(self, item: Property) -> "_Argument":
        return _Argument(item, self._dialect, self._limits, self._parameters, self._writer)

    def _rest(self, number: int) -> str:
        """Return the rule of the text after the first mark that follows an argument's value."""
        return self._writer.rule_of_bits(
            f"{self._key} after {number}", lambda: " | ".join(self._ways_after(number))
        )

    def _ways_after(self, number: int) -> Iterator[str]:
        group, is_last = self._groups[number], number + 1 == len(self._groups)
        begun = f"{self._started(number)}::_"
        for to_next, to_end in zip(self._to_next, self._to_end, strict=True):
            yield when(chain(to_next, begun), group.has_more if is_last else ALWAYS)
            if self._may_end(number + 1):
                yield when(to_end, group.is_complete)

    def _written(self, template: Template) -> str:
        return sequence(fill(template, {}, self._writer))


class _Argument:
    """Writes the expression of one argument."""

    def __init__(
        self,
        item: Property,
        dialect: Tags,
        limits: Limits,
        parameters: Parameters,
        writer: GrammarWriter,
    ) -> None:
        self._item = item
        self._dialect = dialect
        self._limits = limits
        self._parameters = parameters
        self._writer = writer
        self._kinds = kinds(item.pointer, item.schema, parameters)
        self._types = frozenset[str]().union(*(kind.types for kind in self._kinds))

    def element(self) -> str:
        begin, end = split_at(self._dialect.parameter, VALUE)
        first, *others = fill(end, {KEY: self._dialect.spelled(self._item.name)}, self._writer)
        return self.write(begin, Ending(first, sequence(others)))

    def write(self, begin: Template, ending: Ending) -> str:
        """Return the expression of the argument from a part of its beginning to its ending."""
        return self._writer.rule(alternatives(self._ways(begin, ending)))

    def _ways(self, begin: Template, ending: Ending) -> Iterator[str]:
        """Yield the expressions of the argument as text and as JSON."""
        texts = [kind for kind in self._kinds if kind.is_text]
        others = [kind for kind in self._kinds if not kind.is_text]
        if texts and not self._dialect.types:
            # Values that a text could be taken for are constants beside it.
            texts += [kind for kind in others if self._constants(kind)]
            others = [kind for kind in others if not self._constants(kind)]
        if texts:
            yield chain(self._tagged(begin, "string"), self._spelled(texts, ending))
        for name, kinds_of_type in self._by_type(others).items():
            value = self._nested if self._dialect.mark else self._json
            end = chain(sequence([ending.first]), ending.rest)
            yield chain(self._tagged(begin, name), value(kinds_of_type), end)

    def _by_type(self, others: list[Kind]) -> dict[str, list[Kind]]:
        """Return the kinds grouped by the type names that tags can state."""
        found: dict[str, tuple[str, list[Kind]]] = {}
        for kind in others:
            name = kind.type_name
            _, group = found.setdefault(self._dialect.types.get(name, ""), (name, []))
            group.append(kind)
        return dict(found.values())

    def _tagged(self, begin: Template, type_name: str) -> str:
        name = self._dialect.spelled(self._item.name)
        values = {KEY: name, TYPE: self._dialect.types.get(type_name, "")}
        return sequence(fill(begin, values, self._writer))

    def _nested(self, others: list[Kind]) -> str:
        """Return the expression of values whose objects and arrays are nested elements."""
        nested = [kind for kind in others if kind.types in _NESTED and "const" not in kind.schema]
        if nested and len(self._kinds) > 1 and self._types - {*nested[0].types, "null"}:
            raise self._parameters.error(
                nested[0].pointer, "elements would be read as a value of another type"
            )
        scalars = [kind for kind in others if kind not in nested]
        ways = [self._json(scalars)] if scalars else []
        return alternatives([*ways, *map(self._elements, nested)])

    def _elements(self, kind: Kind) -> str:
        key = f"{self._parameters.tool} {kind.pointer} {min(kind.types)}"
        body = self._items if kind.types == _ARRAY else self._members
        return self._writer.recursive_rule(key, lambda: body(kind) or '""')

    def _items(self, kind: Kind) -> str:
        self._parameters.require_only(kind, OF_ARRAYS, "here")
        schema = kind.schema.get("items", True)
        item = self._argument(Property("item", f"{kind.pointer}/items", schema, is_required=True))
        return repeated(item, kind.schema.get("minItems", 0), kind.schema.get("maxItems"))

    def _members(self, kind: Kind) -> str:
        others = kind.schema.get("additionalProperties", True)
        if not kind.schema.get("properties") and others is not False:
            return self._json([kind])
        found = properties(kind, self._parameters)
        return members_in(found, self._argument, self._argument, self._writer)

    def _argument(self, item: Property) -> str:
        inner = _Argument(item, self._dialect, self._limits, self._parameters, self._writer)
        return self._writer.rule(inner.element())

    def _json(self, others: list[Kind]) -> str:
        """Return the expression of values that are not text."""
        if not self._dialect.types and all(kind.types == _BOOLEAN for kind in others):
            return alternatives(quoted(text) for kind in others for text in self._constants(kind))
        # Readers recognise the strings of a value that is JSON for certain.
        is_certain = bool(self._dialect.types) or (self._types and "string" not in self._types)
        tags = () if is_certain and not self._dialect.mark else self._limits.tags
        return json_in_any_order(others, self._parameters, self._writer, tags)

    def _spelled(self, texts: list[Kind], ending: Ending) -> str:
        """Return the expression of texts and their ending."""
        constants = [text for kind in texts for text in self._constants(kind) or ()]
        ways = [self._constant_texts(texts, ending)] if constants else []
        for kind in texts:
            if not self._constants(kind):
                ways += self._free(kind, ending)
        return alternatives(ways)

    def _constant_texts(self, texts: list[Kind], ending: Ending) -> str:
        spelled = alternatives(
            self._constant(text, kind) for kind in texts for text in self._constants(kind)
        )
        return ending.after(spelled, self._writer)

    def _free(self, kind: Kind, ending: Ending) -> Iterator[str]:
        """Yield the expressions of a kind of text that has no end of values."""
        self._parameters.require_only(kind, IMPLIED_TYPES["string"], "for a string in this format")
        conditions = _conditions(kind, self._parameters)
        begin, end = self._dialect.verbatim
        if begin:
            is_text = isinstance(ending.first, str)
            rest = ending.rest if is_text else chain(sequence([ending.first]), ending.rest)
            marked = Ending(end + str(ending.first) if is_text else end, rest)
            yield chain(quoted(begin), self._raw(conditions, marked))
            conditions.append(f"~/(?s:.*)[{escaped(self._dialect.special)}](?s:.*)/")
        yield self._raw(conditions, ending)

    def _raw(self, conditions: Sequence[str], ending: Ending) -> str:
        looks = map(_LOOKS.__getitem__, self._other_looks())
        text = RawText.of(self._limits, self._writer.vocabulary, conditions, looks)
        return text.before(ending, self._writer)

    def _other_looks(self) -> list[str]:
        """Return the types that a reader could mistake a string for."""
        if self._dialect.types or not self._types:
            return []
        if "string" in self._types:
            return sorted(self._types - {"string"})
        # In text that looks like JSON, readers look for its strings.
        return ["array", "object"]

    def _constants(self, kind: Kind) -> tuple[str, ...]:
        """Return the texts of a kind that has only a few, or none."""
        if "const" in kind.schema:
            value = kind.schema["const"]
            return (value if isinstance(value, str) else json_text(value),)
        return next((_CONSTANTS[name] for name in kind.types if name in _CONSTANTS), ())

    def _constant(self, text: str, kind: Kind) -> str:
        if kind.is_text:
            looks = (name for name in self._other_looks() if re.fullmatch(_LOOKS[name], text))
            if look := next(looks, ""):
                raise self._parameters.error(kind.pointer, f"{text!r} would be read as {look}")
        begin, end = self._dialect.verbatim if {*self._dialect.special} & {*text} else ("", "")
        is_plain = bool(self._dialect.verbatim[0]) and not begin
        if not is_plain and (found := self._limits.found_in(text)):
            raise self._parameters.error(kind.pointer, f"a value contains {found!r}")
        return quoted(begin + text + end) or '""'


def arguments_in(
    dialect: Dialect, site: CallSite, parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments, and of the text after them.

    Raises:
        PartError: A parameter cannot be enforced.
    """
    match dialect:
        case Tags():
            return _tagged_arguments(dialect, site, parameters, writer)
        case Literals():
            return _literal_arguments(dialect, site, parameters, writer)
        case _:
            after = sequence(fill(site.after, {}, writer))
            return chain(json_arguments(parameters, writer), after)
