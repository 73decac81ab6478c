"""Arguments in tags around raw values, `<parameter=a>…</parameter>`.

Strings are raw text, without quotes or escapes; everything else is JSON. Where the schema allows
both, text that would be read as the other is refused.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from backend.formats.closing import Limits, TagEnds
from backend.formats.dialects import Tags
from backend.formats.template import KEY, MAYBE_LINE, TYPE, VALUE, Template, split_at, text_of
from backend.sampling.grammar.schema.patterns import PatternError, string_terminals
from backend.sampling.grammar.tools.json_values import json_part, json_text
from backend.sampling.grammar.tools.kinds import Kind, Property, arguments, kinds, properties
from backend.sampling.grammar.tools.parameters import Parameters
from backend.sampling.grammar.tools.raw_text import Ending, RawText
from backend.sampling.grammar.tools.site import CallSite
from backend.sampling.grammar.tools.template import fill
from backend.sampling.grammar.writer import (
    GrammarWriter,
    alternatives,
    chain,
    escaped,
    quoted,
    repeated,
    sequence,
)

_SPACE = r"[\s\x1C-\x1F\\]*"
_SIGNS = r"[-+.(\s\x1C-\x1F\\]*"
_NUMBER = rf"{_SIGNS}[0-9](?s:.*)"
# Texts that a reader takes for a value of the type rather than for a string.
_LOOKS = {
    "null": rf"{_SPACE}(?i:null|none){_SPACE}",
    "boolean": rf"{_SPACE}(?i:true|false){_SPACE}",
    "integer": _NUMBER,
    "number": _NUMBER,
    "object": rf"{_SIGNS}\{{(?s:.*)",
    "array": rf"{_SIGNS}([0-9\[{{(]|[uUrR]?[\x22']|(True|False|None)[\s,])(?s:.*)",
}
_ARRAY = frozenset({"array"})
_NESTED = (_ARRAY, frozenset({"object"}))
_CONSTANTS = {"null": ("null",), "boolean": ("true", "false")}
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")


def tagged_arguments(
    dialect: Tags, site: CallSite, parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments in tags, and of what follows them.

    Raises:
        PartError: A parameter cannot be enforced.
    """
    return alternatives(
        _Arguments(kind, dialect, site, parameters, writer).write()
        for kind in arguments(parameters)
    )


class _Arguments:
    """Writes the expressions of the arguments of a call.

    The end of a value is written together with the beginning of what follows it: only there are
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
        self._dialect = dialect
        self._site = site
        self._ends = TagEnds.of(site.reading, dialect)
        limits = self._ends.limits(dialect, site.opener, site.after)
        self._limits = replace(limits, inside=(*limits.inside, *site.foreign))
        (start, *begin), end = split_at(dialect.parameter, VALUE)
        self._start, self._begin, self._end = str(start), tuple(begin), text_of(end)
        self._lines = ("", "\n") if MAYBE_LINE in end else ("",)
        self._parameters = parameters
        self._writer = writer
        self._written_from: dict[int, str] = {}

    def write(self) -> str:
        if self._dialect.mark:
            return chain(*map(self._element, self._items), self._written(self._site.after))
        ways = [chain(self._written((self._start,)), self._started(0))] if self._items else []
        if not any(item.is_required for item in self._items):
            ways.append(self._written(self._site.after))
        return alternatives(ways)

    def _element(self, item: Property) -> str:
        """Return the expression of an argument that no other text looks like."""
        argument = _Argument(item, self._dialect, self._limits, self._parameters, self._writer)
        return repeated(self._writer.rule(argument.element()), int(item.is_required), 1)

    def _started(self, index: int) -> str:
        """Return the expression of arguments from one on, after the beginning of their first."""
        if index not in self._written_from:
            item = self._items[index]
            argument = _Argument(item, self._dialect, self._limits, self._parameters, self._writer)
            ways = [argument.write(self._begin, self._ending(index))]
            if index + 1 < len(self._items) and not item.is_required:
                ways.append(self._started(index + 1))
            self._written_from[index] = self._writer.rule(alternatives(ways))
        return self._written_from[index]

    def _ending(self, index: int) -> Ending:
        """Return what follows the value of an argument."""
        begin, mark, end = self._end.partition(self._ends.ends[0])
        first, *others = self._writer.pieces(begin + mark)
        ways = []
        for line in self._lines:
            if index + 1 < len(self._items):
                text = sequence([*others, *self._writer.pieces(end + line + self._start)])
                ways.append(chain(text, self._started(index + 1)))
            if not any(item.is_required for item in self._items[index + 1 :]):
                after = text_of(self._site.after)
                ways.append(sequence([*others, *self._writer.pieces(end + line + after)]))
        return Ending(first, self._writer.rule(alternatives(ways)))

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
        """Return the expression of the whole argument."""
        begin, end = split_at(self._dialect.parameter, VALUE)
        first, *others = fill(end, {KEY: self._item.name}, self._writer)
        return self.write(begin, Ending(first, sequence(others)))

    def write(self, begin: Template, ending: Ending) -> str:
        """Return the expression of the argument from a part of its beginning to what follows."""
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
        values = {KEY: self._item.name, TYPE: self._dialect.types.get(type_name, "")}
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
        for keyword in sorted(kind.constraints("items", "minItems", "maxItems")):
            raise self._parameters.error(f"{kind.pointer}/{keyword}", "cannot be enforced here")
        schema = kind.schema.get("items", True)
        item = self._argument(Property("item", f"{kind.pointer}/items", schema, is_required=True))
        return repeated(item, kind.schema.get("minItems", 0), kind.schema.get("maxItems"))

    def _members(self, kind: Kind) -> str:
        others = kind.schema.get("additionalProperties", True)
        if not kind.schema.get("properties") and others is not False:
            return self._json([kind])
        return chain(*map(self._argument, properties(kind, self._parameters)))

    def _argument(self, item: Property) -> str:
        inner = _Argument(item, self._dialect, self._limits, self._parameters, self._writer)
        return repeated(self._writer.rule(inner.element()), int(item.is_required), 1)

    def _json(self, others: list[Kind]) -> str:
        """Return the expression of values that are not text."""
        # Readers recognise the strings of a value that is JSON for certain.
        is_told = bool(self._dialect.types) or (self._types and "string" not in self._types)
        tags = () if is_told and not self._dialect.mark else self._limits.tags
        schema = self._json_schema(others)
        return self._writer.rule(json_part(schema, self._parameters, tags))

    def _json_schema(self, others: list[Kind]) -> dict[str, object]:
        if len(others) == len(self._kinds) and isinstance(self._item.schema, dict):
            return dict(self._item.schema)
        return {"anyOf": [dict(kind.schema) for kind in others]}

    def _spelled(self, texts: list[Kind], ending: Ending) -> str:
        """Return the expression of texts and what follows them."""
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
        conditions = list(self._conditions(kind))
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

    def _conditions(self, kind: Kind) -> Iterator[str]:
        """Yield terminals that a string must all match."""
        for keyword in sorted(kind.constraints(*_OF_STRINGS)):
            raise self._parameters.error(
                f"{kind.pointer}/{keyword}", "cannot be enforced for a string in this format"
            )
        try:
            yield from string_terminals(kind.schema)
        except PatternError as error:
            raise self._parameters.error(f"{kind.pointer}/pattern", str(error)) from error

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
