"""Finds calls in the whole text of a block, however damaged, in each dialect."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from backend.formats import literal, tagged
from backend.formats.dialects import JSON_CALLS, Literals, NamedJson, Objects, Reading, Tags
from backend.formats.format import ToolFormat
from backend.formats.template import ARGUMENTS, split_at, text_of
from backend.output.readers.values.schema import NOT_A_STRING, STRING, ParameterTypes
from backend.output.readers.values.tolerant_json import (
    NotJsonError,
    Repaired,
    mended_value,
    read_json,
    read_members,
)
from backend.output.readers.values.typed_value import json_string
from backend.output.repair.markup import call_ends
from backend.output.repair.names import Names, last_name, offered_name
from backend.output.repair.tags import TagWords

_NAME_KEYS = ("name", "tool_name", "function", "tool")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "params")
_CALL_KEYS = {*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id", "index", "tool_call_id"}
_NAMED = re.compile(
    r"""\{\s*["']?(?:tool_)?name["']?\s*:\s*["'](?P<name>[^"']+)["']\s*,\s*"""
    r"""["']?(?:arguments|parameters|args)["']?\s*:\s*(?=\{)"""
)
_CLOSERS = re.compile(r"\s*\)")
_OBJECT = re.compile(r"\s*(\{)")
_CALLED = re.compile(r"(?<![\w./-])([\w./-]++)\s*+[({]")
# Each failure may have read to the end of the block: after this many it is not a call.
_MAX_FAILURES = 32


# Models that drift from their own format fall back to these.
_FALLBACKS = tuple(
    Reading(dialect=dialect)
    for dialect in (
        tagged.QWEN3_CODER_TAGS,
        tagged.MINIMAX_M2_TAGS,
        JSON_CALLS,
        literal.PYTHONIC_CALLS,
    )
)


@dataclass(frozen=True, slots=True)
class RepairedCall:
    """A call that was read despite damage.

    Attributes:
        arguments: A JSON object.
        end: Position after it in the text of the block.
        reasons: The repairs made.
        is_open: Whether the text ended before the arguments did.
    """

    name: str
    arguments: str
    end: int
    reasons: tuple[str, ...] = ()
    is_open: bool = False


def repaired_calls(
    tool_format: ToolFormat, raw: str, names: Names, *, is_cut: bool = False
) -> list[RepairedCall]:
    """Return the calls in a block, read by the first of a format's dialects that finds any.

    Args:
        tool_format: The model's format.
        raw: The text of a block, including its opener, up to its end.
        names: The offered tools.
        is_cut: Whether the reply ended before the block did.
    """
    failures = iter(range(_MAX_FAILURES))
    quotes = _quotes(tool_format)
    # JSON that lacks its end ends before the markers.
    body = _last_markers(tool_format).sub("", raw)
    for reading in (*tool_format.readings, *_FALLBACKS):
        is_json = isinstance(reading.dialect, Objects | NamedJson)
        text = body if is_json else raw
        if isinstance(reading.dialect, Literals):
            calls = _literal_calls(quotes, text, names, failures)
        else:
            calls = _calls_of(reading, text, names, failures, is_cut=is_cut)
        if found := list(calls):
            return found
    return []


@lru_cache
def _quotes(tool_format: ToolFormat) -> tuple[str, ...]:
    """Return the quotes of a format, and those of most programming languages."""
    dialects = [reading.dialect for reading in tool_format.readings]
    own = [quote for each in dialects if isinstance(each, Literals) for quote in each.quotes]
    return tuple(dict.fromkeys((*own, *literal.PYTHONIC_CALLS.quotes, '"', "'")))


@lru_cache
def _last_markers(tool_format: ToolFormat) -> re.Pattern[str]:
    """Return a pattern for the markers at the end of a block."""
    ends = (mark for reading in tool_format.readings for mark in call_ends(reading.dialect))
    texts = (*ends, *tool_format.closers, *tool_format.tokens, "```")
    markers = "|".join(re.escape(text) for text in texts if text not in tool_format.openers)
    return re.compile(rf"(?:(?:{markers})\s*)+\Z")


def _calls_of(
    reading: Reading, raw: str, names: Names, failures: Iterator[int], *, is_cut: bool
) -> Iterator[RepairedCall]:
    match reading.dialect:
        case Objects():
            yield from _object_calls(raw, names, failures)
        case NamedJson():
            yield from _named_calls(reading.dialect, raw, names, failures)
        case Tags():
            yield from _tagged_calls(reading.dialect, raw, names, failures, is_cut=is_cut)


def _object_calls(raw: str, names: Names, failures: Iterator[int]) -> Iterator[RepairedCall]:
    # Without a marker, an object with other keys is an answer.
    is_bare = raw.lstrip().startswith(("{", "["))
    position = raw.find("{")
    while position >= 0:
        try:
            found = read_json(raw, position)
        except NotJsonError:
            call = None if is_bare else _broken_object(raw, position, names)
            if call is not None:
                yield call
            elif next(failures, None) is None:
                return
            position = raw.find("{", call.end if call else position + 1)
            continue
        call = _call_of(found, names, is_doubtful=is_bare)
        if call is not None:
            yield call
        position = raw.find("{", found.end)


def _call_of(found: Repaired, names: Names, *, is_doubtful: bool) -> RepairedCall | None:
    """Return the call that an object represents, if any."""
    fields = found.members
    if fields.get("function", "").startswith("{"):
        fields = {**fields, **read_json(fields["function"], 0).members}
    texts = (_text_in(fields[key]) for key in _NAME_KEYS if key in fields)
    name = offered_name(next((text for text in texts if text is not None), ""), names)
    given = next((fields[key] for key in _ARGUMENT_KEYS if key in fields), "")
    if (text := _text_in(given)) is not None:
        given = _object_in(text)
    if not (name and given.startswith("{")) or (is_doubtful and not fields.keys() <= _CALL_KEYS):
        return None
    return RepairedCall(name, given, found.end, found.reasons, is_open=found.is_open)


def _text_in(value: str) -> str | None:
    """Return the text of a JSON string, or `None` for another value."""
    return str(json.loads(value)) if value.startswith('"') else None


def _object_in(text: str) -> str:
    """Return the object in a text as JSON, or an empty text."""
    try:
        return read_json(text, 0).text
    except NotJsonError:
        return ""


def _broken_object(raw: str, position: int, names: Names) -> RepairedCall | None:
    """Return the call in an object that ends too early or too late."""
    found = _NAMED.match(raw, position)
    name = offered_name(found["name"], names) if found else ""
    if found is None or not name:
        return None
    try:
        arguments = read_json(raw, found.end())
    except NotJsonError:
        return None
    return RepairedCall(
        name, arguments.text, arguments.end, ("a damaged object",), arguments.is_open
    )


def _named_calls(
    dialect: NamedJson | None, raw: str, names: Names, failures: Iterator[int]
) -> Iterator[RepairedCall]:
    """Yield calls with names before JSON."""
    if raw.lstrip().startswith(("{", "[{")):
        return
    start, end = _call_markers(dialect) if dialect else ("", "")
    ends = _marks_at_end(dialect) if dialect else re.compile("(?!)")
    offset = 0
    for part in raw.split(start) if len(start) > 1 else [raw]:
        body = ends.sub("", part.partition(end)[0] if len(end) > 1 else part)
        begin, position, name = body.find("{"), 0, ""
        while begin >= 0:
            # A name comes directly before its arguments: no bracket closes between them.
            _, closer, after = body[position:begin].rpartition("}")
            name = last_name(after, names) or ("" if closer else name)
            position = begin + 1
            if name:
                try:
                    found = read_json(body, begin)
                except NotJsonError:
                    if next(failures, None) is None:
                        return
                    begin = body.find("{", position)
                    continue
                yield RepairedCall(
                    name, found.text, offset + found.end, found.reasons, found.is_open
                )
                position, name = found.end, ""
            begin = body.find("{", position)
        offset += len(part) + len(start)


@lru_cache
def _marks_at_end(dialect: NamedJson) -> re.Pattern[str]:
    """Return a pattern for the marks after the arguments of a call."""
    marks = "|".join(map(re.escape, call_ends(dialect))) or "(?!)"
    return re.compile(rf"\s*(?:(?:{marks})\s*)+\Z")


def _call_markers(dialect: NamedJson) -> tuple[str, str]:
    """Return the markers at the beginning and the end of a call."""
    begin, end = split_at(dialect.call, ARGUMENTS)
    return text_of(begin[:1]).strip(), text_of(end[-1:]).strip().strip("`").strip()


def _literal_calls(
    quotes: tuple[str, ...], raw: str, names: Names, failures: Iterator[int]
) -> Iterator[RepairedCall]:
    """Yield calls in brackets of any kind."""
    position = 0
    while found := _CALLED.search(raw, position):
        position = found.end()
        name = offered_name(found[1], names)
        if not name:
            continue
        try:
            # A bracket unknown to the dialect counts as the known one, and may enclose an object.
            inner = _OBJECT.match(raw, found.end())
            is_json = inner is not None and raw[found.end() - 1] == "("
            read = read_json if is_json else read_members
            arguments = read(raw, inner.start(1) if inner and is_json else found.end(), quotes)
        except NotJsonError:
            if next(failures, None) is None:
                return
            continue
        closer = _CLOSERS.match(raw, arguments.end)
        end = closer.end() if closer else arguments.end
        reasons = arguments.reasons or ("other brackets",)
        yield RepairedCall(name, arguments.text, end, reasons, arguments.is_open)
        position = end


def _tagged_calls(
    dialect: Tags, raw: str, names: Names, failures: Iterator[int], *, is_cut: bool
) -> Iterator[RepairedCall]:
    """Yield calls in tags, some of which are missing, repeated or wrong."""
    tags = TagWords(dialect)
    for begin, end, is_closed in tags.calls(raw, names):
        label, head_end = tags.name_at(raw, begin)
        name = offered_name(label, names)
        body = raw[head_end:end]
        types = names.parameter_types(name)
        if not (arguments := dict(tags.arguments(body, types.names))) and "{" in body:
            moved = head_end - len(name) - 1
            for call in _named_calls(None, f"{name} {body}", names, failures):
                yield replace(call, end=call.end + moved)
            continue
        if tags.has_other_text(body) if not arguments else is_cut and not tags.has_ended(body):
            return
        fields = (
            f"{json_string(key)}: {_value(text, kind, types, key, dialect)}"
            for key, (text, kind) in arguments.items()
        )
        text = f"{{{', '.join(fields)}}}"
        yield RepairedCall(name, text, end, ("tags",), is_open=not is_closed)


def _value(text: str, kind: str, types: ParameterTypes, key: str, dialect: Tags) -> str:
    if kind and kind in dialect.types.values():
        is_string = kind == dialect.types["string"]
        return mended_value(text, STRING if is_string else NOT_A_STRING)
    return mended_value(text, types.of(key))
