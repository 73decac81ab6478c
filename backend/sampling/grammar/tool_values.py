"""The parts of written arguments: templates, members in any order, JSON, and raw text."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, TypeAlias, assert_never

from backend.formats.closing import Limits, literal
from backend.formats.dialects import Characters, Id, Maybe, Part, Reading, Slot, Template
from backend.sampling.grammar.schema import (
    ANNOTATIONS,
    SETTINGS,
    AnySchema,
    Schema,
    json_rule,
    tightened,
    type_names,
)
from backend.sampling.grammar.tool_parameters import (
    OF_ARRAYS,
    OF_OBJECTS,
    Group,
    Kind,
    Parameters,
    Property,
    groups,
    kinds,
    properties,
)
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import (
    NONE_SET,
    Expression,
    GrammarWriter,
    Piece,
    alternatives,
    chain,
    quoted,
    repeated,
    sequence,
    tokens_expression,
    when,
)


@dataclass(frozen=True, slots=True)
class CallSite:
    """The surroundings of the arguments of a call.

    Attributes:
        after: The text after the arguments.
        foreign: Sequences that end the surroundings, wherever they occur.
    """

    reading: Reading
    opener: str
    after: Template
    foreign: tuple[Template, ...] = ()


_NUMBER = Expression("/0|[1-9][0-9]{0,3}/")


def fill(
    template: Iterable[Part], values: Mapping[Slot, Piece], writer: GrammarWriter
) -> Iterator[Piece]:
    """Yield the pieces of a filled template; values never contain markers, however they look."""
    for part in template:
        match part:
            case str():
                yield from writer.pieces(part)
            case Slot.INDEX:
                yield _NUMBER
            case Slot():
                yield values[part]
            case Maybe(inner):
                yield Expression(f"({sequence(fill(inner, values, writer))})?")
            case Characters(pattern):
                yield Expression(f"/{pattern}/")
            case Id(inner):
                yield from fill(inner, values, writer)
            case _:
                assert_never(part)


_DEFINITIONS = "#/$defs/"
# As templates write calls.
_SETTINGS = SETTINGS | {"item_separator": ", ", "key_separator": ": "}


def members_in(
    items: Sequence[Property],
    first: Callable[[Property], str],
    later: Callable[[Property], str],
    writer: GrammarWriter,
) -> str:
    """Return the expression of members in any order, each at most once.

    Args:
        first: Returns that of a member that comes first.
        later: The same after another one.
    """
    begin, rest = "", ""
    for group in reversed(groups(items)):
        rest = _rest_of(group, [later(item) for item in group.items], rest, writer)
        ways = [
            chain(first(item), f"{rest}::{1 << bit:#x}") for bit, item in enumerate(group.items)
        ]
        begin = alternatives([*ways, *[begin] * (not group.required)])
        rest = f"{rest}::{NONE_SET}"
    return begin


def _rest_of(group: Group, members: Sequence[str], after: str, writer: GrammarWriter) -> str:
    """Return the rule of the members that are left, by bits, and of the text after the group."""
    key = f"members {group.required} {members} {after}"

    def ways() -> str:
        rest = writer.rule_of_bits(key, ways)
        nexts = (
            when(chain(each, f"{rest}::set_bit({bit})"), f"bit_clear({bit})")
            for bit, each in enumerate(members)
        )
        return " | ".join([*nexts, when(after, group.is_complete)])

    return writer.rule_of_bits(key, ways)


def json_arguments(parameters: Parameters, writer: GrammarWriter) -> str:
    """Return the expression of the arguments as a JSON object."""
    return json_in_any_order(kinds("#", parameters.schema, parameters), parameters, writer)


def json_in_any_order(
    found: Sequence[Kind],
    parameters: Parameters,
    writer: GrammarWriter,
    forbidden: tuple[str, ...] = (),
) -> str:
    """Return the expression of a JSON value whose objects have their members in any order.

    Objects that may have other members than the declared ones keep the schema's order.

    Args:
        found: The kinds of the value.
        forbidden: Tags that the value does not contain.
    """
    return _JsonValues(parameters, writer, forbidden).value(found)


_ANY_TYPE: Schema = {"type": ["string", "number", "boolean", "null", "array", "object"]}


@dataclass(frozen=True, slots=True)
class _JsonValues:
    parameters: Parameters
    writer: GrammarWriter
    forbidden: tuple[str, ...]

    def value(self, found: Sequence[Kind]) -> str:
        nested = [kind for kind in found if _has_members(kind) or _has_such_items(kind)]
        ways = [self._nested(kind) for kind in nested]
        if others := [kind for kind in found if kind not in nested]:
            whole = json_part(_schema_of(others), self.parameters, self.forbidden)
            ways.append(self.writer.rule(whole))
        return alternatives(ways)

    def _nested(self, kind: Kind) -> str:
        body = self._object if _has_members(kind) else self._list
        key = f"{self.parameters.tool} {kind.pointer} {body.__name__} {self.forbidden}"
        return self.writer.recursive_rule(key, lambda: body(kind))

    def _at(self, pointer: str, schema: AnySchema) -> str:
        return self.value(kinds(pointer, schema, self.parameters))

    def _object(self, kind: Kind) -> str:
        items = properties(kind, self.parameters)
        values = {item.name: self._at(item.pointer, item.schema) for item in items}

        def member(begin: str, item: Property) -> str:
            return chain(quoted(f"{begin}{json_text(item.name)}: "), values[item.name])

        first, later = partial(member, ""), partial(member, ", ")
        members = members_in(items, first, later, self.writer)
        return chain(quoted("{"), members, quoted("}"))

    def _list(self, kind: Kind) -> str:
        item = self._at(f"{kind.pointer}/items", kind.schema["items"])
        return json_list(item, kind.schema.get("minItems", 0), kind.schema.get("maxItems"))


def _has_members(kind: Kind) -> bool:
    """Tell whether it is an object of just the declared members."""
    others = kind.schema.get("additionalProperties")
    is_object = kind.types == {"object"} and not kind.constraints(*OF_OBJECTS)
    return is_object and bool(kind.schema.get("properties")) and not others


def _has_such_items(kind: Kind) -> bool:
    """Tell whether it is an array in which objects may be."""
    items = kind.schema.get("items")
    is_array = kind.types == {"array"} and not kind.constraints(*OF_ARRAYS)
    if not is_array or not isinstance(items, Mapping):
        return False
    return bool({"$ref", "anyOf"} & items.keys() or {"object", "array"} & type_names(items))


def _schema_of(found: Sequence[Kind]) -> Schema:
    """Return the schema of values of any of these kinds."""
    constants = [kind.schema["const"] for kind in found if "const" in kind.schema]
    ways = [dict(kind.schema) for kind in found if "const" not in kind.schema]
    ways += [{"enum": constants}] if constants else []
    own = ways[0] if len(ways) == 1 else {"anyOf": ways}
    return {key: value for key, value in own.items() if key not in ANNOTATIONS} or _ANY_TYPE


def json_list(item: str, least: int = 0, most: int | None = None, comma: str = ", ") -> str:
    """Return the expression of an array of `least` to `most` items."""
    if most == 0:
        return quoted("[]")
    later = chain(quoted(comma), item)
    items = chain(item, repeated(later, max(least - 1, 0), None if most is None else most - 1))
    return chain(quoted("["), repeated(items, min(least, 1), 1), quoted("]"))


def json_value(schema: Schema, forbidden: tuple[str, ...] = ()) -> str:
    """Return the expression of a JSON value that contains none of the forbidden tags."""
    return json_rule(tightened(schema, forbidden), _SETTINGS)


def json_part(schema: Schema, parameters: Parameters, forbidden: tuple[str, ...] = ()) -> str:
    """Return the same for a value whose schema is part of a tool's."""
    definitions: dict[str, AnySchema] = {}
    waiting = _references(schema)
    while waiting:
        name = waiting.pop().removeprefix(_DEFINITIONS)
        if name not in definitions:
            definitions[name] = parameters.schema["$defs"][name]
            waiting += _references(definitions[name])
    whole = {**schema, "$defs": definitions} if definitions else schema
    return json_value(whole, forbidden)


def json_text(value: object) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


def _references(schema: object) -> list[str]:
    return re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))


_ANY = "(?s:.*)"
_SAMPLES = ("", " ", "x", "]", '"', "\n", ">", ":")

# A token, or a text that is spelled out.
Mark: TypeAlias = int | str


class _Passage(NamedTuple):
    """A regular expression for the text between two marks, and a text that it matches."""

    pattern: str
    sample: str


@dataclass(frozen=True, slots=True, eq=False)
class _Track:
    """A sequence that values do not contain.

    Attributes:
        passages: The texts before, between and after the marks.
        marks: Its marks, at least one unless it is only a passage.
        is_last: Whether values may contain it, but not end with it.
    """

    passages: tuple[_Passage, ...]
    marks: tuple[Mark, ...]
    is_last: bool
    number: int


# The passages that may come next, each by the number of marks before it.
State: TypeAlias = frozenset[tuple[_Track, int]]


@dataclass(frozen=True, slots=True)
class Ending:
    """The text after a value.

    Attributes:
        first: The mark that ends the value, with the text before the mark, or else the first token.
        rest: The expression of everything after that.
    """

    first: Piece
    rest: str

    def after(self, text: str, writer: GrammarWriter) -> str:
        """Return the expression of a text in the form of a terminal, and of this."""
        if isinstance(self.first, str):
            return chain(writer.terminal(chain(f"({text})", quoted(self.first))), self.rest)
        return chain(writer.terminal(f"({text})"), sequence((self.first,)), self.rest)


@dataclass(frozen=True, slots=True)
class _Check:
    """A condition on the passage before a mark, under which a track goes on."""

    track: _Track
    place: int
    pattern: str
    sample: str


@dataclass(frozen=True, slots=True)
class _Step:
    """From one state to the next, over a passage and a mark; no state is before the first."""

    before: State | None
    passage: str
    mark: Piece
    after: State


class RawText:
    """The texts that may be the value of an argument."""

    def __init__(
        self,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        conditions: Iterable[str] = (),
        looks: Iterable[str] = (),
    ) -> None:
        """Find out how the text may go on after each mark; one with conditions has no marks.

        It does not match `looks` up to its first mark.
        """
        self._limits, self._vocabulary = limits, vocabulary
        self._pieces = GrammarWriter("", vocabulary).pieces
        self._conditions, self._looks = list(conditions), list(looks)
        self._numbers = count()
        self._texts = {str(first) for first, *_ in limits.last if self._is_spelled(first)}
        inside = self._tracks(limits.inside, is_last=False, is_cut=limits.markers_decide)
        self._running = [*inside, *self._tracks(limits.last, is_last=True)]
        first = self._tracks(limits.first, is_last=False)
        marks = {mark for track in (*self._running, *first) for mark in track.marks}
        self._marks = sorted(marks, key=lambda mark: (isinstance(mark, str), mark))
        self._refusal = self._refused()
        self._begin: State = frozenset((track, 0) for track in first)
        self._steps: dict[State, list[_Step]] = {}
        if not self._conditions:
            self._walk()
        self._keys = {state: self._key(state) for state in self._steps}
        self._lasts = [(state, self._last(state, state)) for state in self._steps]
        self._only = self._last(None, self._begin)

    @classmethod
    def of(
        cls, limits: Limits, vocabulary: Vocabulary, conditions: Iterable[str], looks: Iterable[str]
    ) -> "RawText":
        """Return the texts; those that any schema may have are made once for each model."""
        required, looks = tuple(conditions), tuple(looks)
        if required:
            return cls(limits, vocabulary, conditions=required, looks=looks)
        return vocabulary.once((limits, looks), lambda: cls(limits, vocabulary, looks=looks))

    def before(self, ending: Ending, writer: GrammarWriter) -> str:
        """Return the expression of the text and its ending."""
        ways = [ending.after(self._only, writer)]
        for state, last in self._lasts:
            ways.append(chain(self._reached(state, writer), ending.after(last, writer)))
        return alternatives(ways)

    def _is_spelled(self, part: object) -> bool:
        """Return whether a part of a sequence is a text in which no marker is a token."""
        return isinstance(part, str) and self._pieces(part) == (part,)

    def _tracks(
        self, sequences: Iterable[Template], *, is_last: bool, is_cut: bool = False
    ) -> list[_Track]:
        """Return sequences as tracks; those that differ only at their end become one."""
        merged: dict[tuple[tuple[_Passage, ...], tuple[Mark, ...]], list[_Passage]] = {}
        for parts in sequences:
            passages, marks = self._split(parts, is_cut=is_cut)
            merged.setdefault((tuple(passages[:-1]), tuple(marks)), []).append(passages[-1])
        return [
            _Track((*earlier, _any_of(ends)), marks, is_last, next(self._numbers))
            for (earlier, marks), ends in merged.items()
        ]

    def _split(self, parts: Template, *, is_cut: bool) -> tuple[list[_Passage], list[Mark]]:
        """Return the passages of a sequence, and the marks between them."""
        passages, marks = [_Passage("", "")], list[Mark]()
        may_end = False
        for part in parts:
            may_end |= is_cut and isinstance(part, Characters)
            pieces = (part,) if isinstance(part, Characters) else self._pieces(str(part))
            for piece in pieces:
                if isinstance(piece, int) or piece in self._texts:
                    marks.append(piece)
                    passages.append(_Passage("", ""))
                    if may_end:
                        return passages, marks
                elif not isinstance(piece, Expression):
                    passages[-1] = _joined(passages[-1], _passage(piece))
        return passages, marks

    def _refused(self) -> str:
        """Return a pattern of texts that no passage contains: any mark spelled out, above all."""
        texts = {token: text for text, token in self._vocabulary.markers.items()}
        refused = [mark if isinstance(mark, str) else texts[mark] for mark in self._marks]
        alone = [track.passages[0].pattern for track in self._running if not track.marks]
        return "|".join([*map(literal, refused), *alone])

    def _walk(self) -> None:
        waiting = [*self._steps_from(None)]
        while waiting:
            step = waiting.pop()
            is_new = step.after not in self._steps
            self._steps.setdefault(step.after, []).append(step)
            if is_new:
                waiting += self._steps_from(step.after)

    def _steps_from(self, before: State | None) -> Iterator[_Step]:
        state = self._begin if before is None else before
        vocabulary = self._vocabulary
        others = {*vocabulary.markers.values()} - vocabulary.eos_ids
        for mark in self._marks:
            checks = list(self._checks(state, mark))
            if mark in vocabulary.eos_ids or (not checks and isinstance(mark, int)):
                continue
            others -= {mark}
            yield from self._sorted_steps(before, state, mark, checks)
        if others:
            marks = Expression(tokens_expression(others))
            yield _Step(before, self._passage(before, state), marks, frozenset())

    def _checks(self, state: State, mark: Mark) -> Iterator[_Check]:
        """Yield the checks of the passage before a mark."""
        for track in self._running:
            if track.marks[:1] == (mark,):
                passage = track.passages[0]
                yield _Check(track, 1, _ANY + passage.pattern, passage.sample)
        for track, place in state:
            if track.marks[place : place + 1] == (mark,):
                yield _Check(track, place + 1, *track.passages[place])

    def _sorted_steps(
        self, before: State | None, state: State, mark: Mark, checks: list[_Check]
    ) -> Iterator[_Step]:
        """Yield a step for each way in which the passage before a mark can pass the checks."""
        patterns = list(dict.fromkeys(check.pattern for check in checks))
        for sample in sorted({"\0", *(check.sample for check in checks)}):
            passed = {pattern for pattern in patterns if re.fullmatch(pattern, sample)}
            likes = [f"/{p}/" for p in patterns if p in passed - {"", _ANY}]
            unlikes = [_unlike(p) for p in patterns if p not in passed]
            after = frozenset((c.track, c.place) for c in checks if c.pattern in passed)
            if not any(_is_complete(track, place) for track, place in after):
                passage = self._passage(before, state, (*likes, *unlikes))
                yield _Step(before, passage, mark, after)

    def _passage(self, before: State | None, state: State, conditions: Iterable[str] = ()) -> str:
        """Return a passage as a terminal without a name."""
        looks = self._looks if before is None else []
        return self._text((*self._not_begun(state), *conditions, *(f"~/{x}/" for x in looks)))

    def _text(self, conditions: Iterable[str]) -> str:
        """Return a terminal, without a name, of text between marks."""
        refused = [f"~/{_ANY}({self._refusal}){_ANY}/"] if self._refusal else []
        return " & ".join(dict.fromkeys([f"/{_ANY}/", *refused, *conditions]))

    def _not_begun(self, state: State) -> list[str]:
        """Return conditions under which a passage does not complete a sequence."""
        return sorted(
            f"~/({track.passages[place].pattern}){_ANY}/"
            for track, place in state
            if not track.is_last and place == len(track.marks)
        )

    def _last(self, before: State | None, state: State) -> str:
        """Return a terminal, without a name, of the last passage of a text."""
        conditions = self._not_begun(state)
        for track, place in _sorted(state):
            if track.is_last and place == len(track.marks):
                conditions.append(_unlike(track.passages[place].pattern))
        if before is None:
            conditions += [*(f"~/{look}/" for look in self._looks), *self._conditions]
        return self._text(conditions)

    def _key(self, state: State) -> str:
        places = [(track.number, place) for track, place in _sorted(state)]
        return f"{self._limits} {self._looks} {places}"

    def _reached(self, state: State, writer: GrammarWriter) -> str:
        """Return the expression of all text up to a mark that leads to a state."""
        key = self._keys[state]
        return writer.recursive_rule(key, lambda: alternatives(self._ways_to(state, writer)))

    def _ways_to(self, state: State, writer: GrammarWriter) -> Iterator[str]:
        for step in self._steps[state]:
            earlier = "" if step.before is None else self._reached(step.before, writer)
            yield chain(earlier, Ending(step.mark, "").after(step.passage, writer))


def _sorted(state: State) -> list[tuple[_Track, int]]:
    return sorted(state, key=lambda item: (item[0].number, item[1]))


def _passage(piece: str | Characters) -> _Passage:
    if isinstance(piece, str):
        return _Passage(literal(piece), piece)
    pattern = piece.pattern
    return _Passage(pattern, next((t for t in _SAMPLES if re.fullmatch(pattern, t)), ""))


def _joined(first: _Passage, second: _Passage) -> _Passage:
    return _Passage(first.pattern + second.pattern, first.sample + second.sample)


def _unlike(pattern: str) -> str:
    return f"~/{pattern}/" if pattern else "/(?s:.)+/"


def _any_of(passages: Iterable[_Passage]) -> _Passage:
    different = list(dict.fromkeys(passages))
    if len(different) == 1 or not all(passage.pattern for passage in different):
        return min(different)
    return _Passage(f"({'|'.join(passage.pattern for passage in different)})", different[0].sample)


def _is_complete(track: _Track, place: int) -> bool:
    """Return whether nothing more is needed after that many marks."""
    return not track.is_last and place == len(track.marks) and not track.passages[place].pattern
