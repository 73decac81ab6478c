"""Calls in the whole text of a block, however damaged, in each dialect."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from backend.formats.dialects import JSON_CALLS, Literals, NamedJson, Objects, Reading, Tags
from backend.formats.format import ToolFormat
from backend.formats.literal import pythonic
from backend.formats.template import ARGUMENTS, KEY, VALUE, Part, split_at, text_of
from backend.output.readers.values.schema import NOT_A_STRING, STRING, ParameterTypes
from backend.output.readers.values.tolerant_json import NotJsonError, Repaired, read_json
from backend.output.readers.values.typed_value import json_string, json_value

_NAME_KEYS = ("name", "tool_name", "function", "tool")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "params")
_CALL_KEYS = {*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id", "index", "tool_call_id"}
_NAMED = re.compile(
    r"""\{\s*["']?(?:tool_)?name["']?\s*:\s*["'](?P<name>[^"']+)["']\s*,\s*"""
    r"""["']?(?:arguments|parameters|args)["']?\s*:\s*(?=\{)"""
)
_LABEL = re.compile(r"\w[\w:.-]*")


# Models that forget their own format fall back on these.
_FALLBACKS = (Reading(dialect=JSON_CALLS), Reading(dialect=pythonic.CALLS))


@dataclass(frozen=True, slots=True)
class RepairedCall:
    """A call that was read in spite of its damage.

    Attributes:
        arguments: A JSON object.
        end: The position after it in the text of the block.
        reasons: The repairs that were needed.
    """

    name: str
    arguments: str
    end: int
    reasons: tuple[str, ...] = field(default=())


class Names(Protocol):
    """Tells which tools were offered."""

    def is_offered(self, name: str) -> bool:
        """Tell whether a call may have this name."""

    def parameter_types(self, name: str) -> ParameterTypes:
        """Return the types of the arguments of a tool."""


def repaired_calls(
    tool_format: ToolFormat, raw: str, names: Names, *, is_cut: bool = False
) -> list[RepairedCall]:
    """Return the calls in a block, as the first dialect of a format reads them that finds any.

    Args:
        tool_format: The format of the model.
        raw: The text of a block, opener included, up to its end.
        names: The tools that were offered.
        is_cut: Whether the reply ended before the block did.
    """
    for reading in (*tool_format.readings, *_FALLBACKS):
        calls = list(_calls_of(reading, raw, names, is_cut=is_cut))
        if calls:
            return calls
    return []


def _calls_of(reading: Reading, raw: str, names: Names, *, is_cut: bool) -> Iterator[RepairedCall]:
    match reading.dialect:
        case Objects():
            yield from _object_calls(raw, names)
        case NamedJson():
            yield from _named_calls(reading.dialect, raw, names)
        case Literals():
            yield from _literal_calls(reading.dialect, raw, names)
        case Tags():
            yield from _tagged_calls(reading.dialect, raw, names, is_cut=is_cut)


def _object_calls(raw: str, names: Names) -> Iterator[RepairedCall]:
    # Without a marker, an object with other keys is an answer.
    is_bare = raw.lstrip().startswith(("{", "["))
    position = raw.find("{")
    while position >= 0:
        try:
            found = read_json(raw, position)
            fields = json.loads(found.text)
        except ValueError:
            call = None if is_bare else _broken_object(raw, position, names)
            if call is not None:
                yield call
            position = raw.find("{", call.end if call else position + 1)
            continue
        call = _call_of(fields, found, names, is_doubtful=is_bare)
        if call is not None:
            yield call
        position = raw.find("{", found.end)


def _call_of(
    fields: dict[str, object], found: Repaired, names: Names, *, is_doubtful: bool
) -> RepairedCall | None:
    """Return the call that an object stands for, if it does."""
    inner = fields.get("function")
    fields = {**fields, **inner} if isinstance(inner, dict) else fields
    name = next((fields[key] for key in _NAME_KEYS if isinstance(fields.get(key), str)), "")
    given = next((fields[key] for key in _ARGUMENT_KEYS if key in fields), None)
    given = _loaded(given) if isinstance(given, str) else given
    is_call = names.is_offered(str(name)) and isinstance(given, dict)
    if not is_call or (is_doubtful and not fields.keys() <= _CALL_KEYS):
        return None
    return RepairedCall(str(name), _dumped(given), found.end, found.reasons)


def _broken_object(raw: str, position: int, names: Names) -> RepairedCall | None:
    """Return the call in an object that ends too early or too late."""
    found = _NAMED.match(raw, position)
    if found is None or not names.is_offered(found["name"]):
        return None
    try:
        arguments = read_json(raw, found.end())
    except NotJsonError:
        return None
    return RepairedCall(found["name"], arguments.text, arguments.end, ("a damaged object",))


def _named_calls(dialect: NamedJson | None, raw: str, names: Names) -> Iterator[RepairedCall]:
    """Yield calls whose names stand before JSON."""
    if raw.lstrip().startswith(("{", "[{")):
        return
    start, end = _call_markers(dialect) if dialect else ("", "")
    offset = 0
    for part in raw.split(start) if len(start) > 1 else [raw]:
        body = part.partition(end)[0] if len(end) > 1 else part
        begin, position = body.find("{"), 0
        while begin >= 0:
            if name := _last_name(body[position:begin], names):
                try:
                    found = read_json(body, begin)
                except NotJsonError:
                    break
                yield RepairedCall(name, found.text, offset + found.end, found.reasons)
                begin = position = found.end
            begin = body.find("{", begin + (not name))
        offset += len(part) + len(start)


def _call_markers(dialect: NamedJson) -> tuple[str, str]:
    """Return the markers at the beginning and at the end of a call."""
    begin, end = split_at(dialect.call, ARGUMENTS)
    return text_of(begin[:1]).strip(), text_of(end[-1:]).strip().strip("`").strip()


def _literal_calls(dialect: Literals, raw: str, names: Names) -> Iterator[RepairedCall]:
    """Yield calls in brackets of any kind."""
    quotes = tuple(dict.fromkeys((*dialect.quotes, '"', "'")))
    position = 0
    while found := re.compile(r"([\w./-]+)\s*([({])").search(raw, position):
        position = found.end()
        if not names.is_offered(found[1]):
            continue
        try:
            # The bracket that the dialect does not have counts as the one that it has.
            text = raw[: found.end() - 1] + "{" + raw[found.end() :]
            arguments = read_json(text, found.end() - 1, quotes)
        except NotJsonError:
            continue
        end = arguments.end + (raw[arguments.end : arguments.end + 1] == ")")
        reasons = arguments.reasons
        yield RepairedCall(found[1], arguments.text, end, reasons or ("other brackets",))
        position = end


def _tagged_calls(dialect: Tags, raw: str, names: Names, *, is_cut: bool) -> Iterator[RepairedCall]:
    """Yield calls in tags of which some are missing, doubled or wrong."""
    tags = _TagWords(dialect)
    for begin, end in tags.calls(raw, names):
        name, head_end = tags.name_at(raw, begin)
        body = raw[head_end:end]
        if not (arguments := dict(tags.arguments(body))) and "{" in body:
            yield from _named_calls(None, f"{name} {body}", names)
            continue
        if tags.has_other_text(body) if not arguments else is_cut and not tags.has_ended(body):
            return
        types = names.parameter_types(name)
        fields = (
            f"{json_string(key)}: {_value(text, kind, types, key, dialect)}"
            for key, (text, kind) in arguments.items()
        )
        yield RepairedCall(name, f"{{{', '.join(fields)}}}", end, ("tags",))


def _value(text: str, kind: str, types: ParameterTypes, key: str, dialect: Tags) -> str:
    if kind and kind in dialect.types.values():
        is_string = kind == dialect.types["string"]
        return json_value(text, STRING if is_string else NOT_A_STRING)
    return json_value(text, types.of(key))


class _TagWords:
    """The tags of a dialect by their words, so that damaged ones are found."""

    def __init__(self, dialect: Tags) -> None:
        call, call_end = split_at(dialect.call, ARGUMENTS)
        begin, end = split_at(dialect.parameter, VALUE)
        self._is_paired = KEY in begin and any(
            isinstance(part, str) and part.startswith("</") for part in begin
        )
        self._mark = re.escape(dialect.mark) or "(?!)"
        self._call = re.compile(_opening(call[0]))
        self._call_end = _closing(call_end)
        self._begin = re.compile(_opening(begin[0]))
        self._texts = [text_of((part,)).strip() for part in begin if isinstance(part, str)]
        ends = (text_of(end).strip(), text_of(call_end).strip(), dialect.mark)
        texts = "|".join(map(re.escape, filter(None, ends)))
        self._ends = re.compile(rf"\s*(?:{texts}|</[^<>\n]*>?)\s*\Z")
        self._value_begin = self._texts[-1 if self._is_paired else 0]
        self._value_end = text_of(end).strip()

    def calls(self, raw: str, names: Names) -> Iterator[tuple[int, int]]:
        """Yield where calls begin and end."""
        begins = [
            found.end()
            for found in self._call.finditer(raw)
            if names.is_offered(_first_label(raw, found.end()))
        ]
        ends = [*begins[1:], len(raw)][: len(begins)]
        for begin, limit in zip(begins, ends, strict=True):
            found = self._call_end.search(raw, begin, limit)
            yield begin, found.end() if found else limit

    def has_other_text(self, body: str) -> bool:
        """Tell whether a body without arguments holds text."""
        return bool(re.sub(r"</?[^<>\n]*>|" + self._mark, "", body).strip())

    def has_ended(self, body: str) -> bool:
        """Tell whether the last value in a body has its end."""
        last = body[max(body.rfind(self._value_begin), 0) :]
        return self._value_end in last or "</" in last

    def name_at(self, raw: str, begin: int) -> tuple[str, int]:
        """Return the name of the call that begins at a position, and where its head ends."""
        name = _first_label(raw, begin)
        end = raw.index(name, begin) + len(name)
        head = re.compile(r"""["']*(?:\s+\w+="\w*")*\s*(?:/?>|<\|sep\|>)?""").match(raw, end)
        return name, head.end() if head else end

    def arguments(self, body: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield keys, each with the raw value and with the type that its tag tells."""
        yield from self._pairs(body) if self._is_paired else self._parameters(body)

    def _parameters(self, body: str) -> Iterator[tuple[str, tuple[str, str]]]:
        tag = re.compile(
            rf"""{self._begin.pattern}\s*["']?(?P<key>[^<>"'\n/]+)["']?"""
            r"""(?:\s+\w+="(?P<kind>\w*)")?\s*(?:/?>|<\|sep\|>)?"""
        )
        found = list(tag.finditer(body))
        limits = [*(match.start() for match in found[1:]), len(body)][: len(found)]
        for match, limit in zip(found, limits, strict=True):
            value = body[match.end() : limit]
            yield match["key"].strip(), (self._cleaned(value), match["kind"] or "")

    def _cleaned(self, value: str) -> str:
        """Return a raw value without the closing tags after it and the newlines around it."""
        while (stripped := self._ends.sub("", value)) != value:
            value = stripped
        return value.removeprefix("\n").removesuffix("\n")

    def _pairs(self, body: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield pairs of which one tag in four may be missing."""
        key, key_end, value = self._texts
        tags = (key, key_end, value, self._value_end)
        pieces = re.split(f"({'|'.join(map(re.escape, tags))})", body)
        name = ""
        before = ""
        for piece in pieces:
            text = piece.strip()
            if piece in tags:
                before = piece
            elif not text:
                continue
            elif before in (key, "") or (before == self._value_end and not name):
                name = text
            elif name:
                yield name, (self._cleaned(text), "")
                name = ""


def _opening(text: Part) -> str:
    """Return a regular expression of an opening tag up to a name, damaged or not."""
    words = str(text).strip()
    pattern = re.escape(words)
    # The sign before the word of a tag, its quotes and spaces may be missing.
    pattern = pattern.replace(re.escape('="'), r"\s*=\s*[\"']?").replace(r"\ ", r"\s+")
    return pattern.removesuffix("=") + (r"\s*=\s*" if words.endswith("=") else "")


def _closing(end: Sequence[Part]) -> re.Pattern[str]:
    return re.compile(re.escape(text_of(tuple(end)).strip()))


def _first_label(raw: str, position: int) -> str:
    found = re.compile(r"""[\s"']*([^\s<>"'/]+)""").match(raw, position)
    return found[1] if found else ""


def offered_name(word: str, names: Names) -> str:
    """Return the offered name in a word, which may have a namespace and a number."""
    parts = re.split("[.:]", word)
    candidates = (word, word.partition(".")[2], word.partition(":")[2], *parts)
    return next(filter(names.is_offered, candidates), "")


def _last_name(text: str, names: Names) -> str:
    """Return the last offered name in a text."""
    words = reversed(_LABEL.findall(text))
    return next(filter(None, (offered_name(word, names) for word in words)), "")


def _loaded(text: str) -> object:
    try:
        return json.loads(read_json(text, 0).text)
    except ValueError:
        return None


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
