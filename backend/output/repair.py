"""Finds calls in the whole text of a block, however damaged, in each dialect."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from backend.formats import literal, tagged
from backend.formats.dialects import (
    ARGUMENTS,
    JSON_CALLS,
    LIST_KEY,
    NESTING_KEYS,
    Literals,
    NamedJson,
    Objects,
    Reading,
    Tags,
    split_at,
    text_of,
)
from backend.formats.format import ToolFormat
from backend.output.readers.patterns import span_end
from backend.output.readers.reader import Names, offered_name
from backend.output.readers.tolerant_json import (
    ODD_QUOTES,
    NotJsonError,
    Repaired,
    read_json,
    read_members,
    repaired_value,
)
from backend.output.readers.typed_values import (
    NOT_A_STRING,
    STRING,
    ParameterTypes,
    agreed_types,
    describes_arguments,
    json_string,
    text_value,
)
from backend.output.tag_repair import TagWords, call_ends, last_name, markup_of

NAME_KEYS = ("name", "tool_name", "function_name", *NESTING_KEYS, "tool", "action")
ARGUMENT_KEYS = (
    *("arguments", "parameters", "args", "input", "params", "tool_args", "tool_input"),
    "action_input",
)
CALL_KEYS = {*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "index", "tool_call_id"}
_NAMED = re.compile(
    r"""\{\s*["']?(?:tool_)?name["']?\s*:\s*["'](?P<name>[^"',]+)["']?\s*,\s*"""
    r"""["']?(?:arguments|parameters|args)["']?\s*:?\s*(?=\{)"""
)
# Repairs of an object that Python would read.
_OF_PYTHON = ("strings in", "a Python constant")
_LAST_TAG = re.compile(r"</[^<>]*>\s*\Z")
_CLOSERS = re.compile(r"\s*\)")
_BETWEEN = re.compile(r"[\s,;]*")
# An object or a list, and no marker in brackets.
_BARE = re.compile(r"\s*+(?:\{|\[(?![A-Z_]+\]))")
# Arguments may be an object, or that with the stars that unpack it.
_OBJECT = re.compile(r"\s*(?:\*\*\s*)?(\{)")
# After a call that cannot be read, another begins after a bracket, not after words or a quote.
_SET_OFF = re.compile(r"(?:[}\])][\s,;]*+\{?[\"']?|</[^<>\n]*>\s*+)\Z")
_CALLED = re.compile(r"(?<![\w./-])([\w./-]++(?::\d++)?)\s*+[({]")
# Each failure may have read to the end of the block: after this many it is not a call.
_MAX_FAILURES = 32


# Models that drift from their own format fall back to these.
_FALLBACKS = tuple(
    Reading(dialect)
    for dialect in (
        tagged.QWEN3_CODER_TAGS,
        tagged.PADDED_MINIMAX_M2_TAGS,
        tagged.MINICPM5_TAGS,
        JSON_CALLS,
        literal.PYTHONIC_CALLS,
    )
)


@dataclass(frozen=True, slots=True)
class RepairedCall:
    """A call that was read despite damage.

    Attributes:
        arguments: A JSON object.
        begin: The place of its name, tag or brace.
        is_open: Whether the text ended before the arguments did.
    """

    name: str
    arguments: str
    begin: int
    end: int
    reasons: tuple[str, ...] = ()
    is_open: bool = False


def repaired_calls(
    tool_format: ToolFormat,
    raw: str,
    names: Names,
    *,
    is_cut: bool = False,
    has_others: bool = False,
) -> list[RepairedCall]:
    """Return the calls in a block, opener included, by the first dialect that finds any.

    Calls inside the arguments of another do not count.

    Args:
        is_cut: Whether the reply ended before the block did.
        has_others: Whether the block has calls of other tools: then it must be sound.
    """
    failures = iter(range(0 if has_others else _MAX_FAILURES))
    quotes = _quotes(tool_format)
    # JSON that lacks its end ends before the markers.
    body = _last_markers(tool_format).sub("", raw)
    lapses = {each for each in tool_format.lapses if not raw.startswith(each.openers)}
    own = (each for each in tool_format.readings if each not in lapses)
    for reading in (*own, *(() if has_others else _FALLBACKS)):
        is_json = isinstance(reading.dialect, Objects | NamedJson)
        text = body if is_json else raw
        if isinstance(reading.dialect, Literals):
            calls = _literal_calls(quotes, text, names, failures, has_others=has_others)
        else:
            calls = _calls_of(reading, text, names, failures, is_cut=is_cut)
        if found := _outer(tool_format, calls, text, names):
            return found
    return [] if has_others else _odd_calls(tool_format, raw, names, failures, is_cut=is_cut)


def _odd_calls(
    tool_format: ToolFormat, raw: str, names: Names, failures: Iterator[int], *, is_cut: bool
) -> list[RepairedCall]:
    """Return calls in tags whose names are not where any dialect has them."""
    readings = (*tool_format.readings, *_FALLBACKS)
    dialects = [each.dialect for each in readings if isinstance(each.dialect, Tags)]
    if any(next(TagWords(each).calls(raw, names), None) for each in dialects):
        return []
    for dialect in dialects:
        calls = _tagged_calls(dialect, raw, names, failures, is_cut=is_cut, is_odd=True)
        if found := _outer(tool_format, calls, raw, names):
            return found
    return []


def _outer(
    tool_format: ToolFormat, calls: Iterable[RepairedCall], raw: str, names: Names
) -> list[RepairedCall]:
    """Return the calls that are not part of a value, which code and examples of calls may be."""
    markup, starts = markup_of(tool_format), _starts(tool_format)
    outer = []
    end = 0
    for call in calls:
        gap = raw[end : call.begin]
        after_start = starts.split(gap)[-1]
        is_set_off = _SET_OFF.search(gap) or gap.rstrip().endswith(_tagged_ends(tool_format))
        if is_set_off or not markup.has_words(after_start, names):
            outer.append(call)
            end = call.end
    return outer


@lru_cache
def _starts(tool_format: ToolFormat) -> re.Pattern[str]:
    """Return a pattern for the markers that calls begin after."""
    dialects = (reading.dialect for reading in tool_format.readings)
    named = (_call_markers(each)[0] for each in dialects if isinstance(each, NamedJson))
    starts = (*tool_format.openers, *(start for start in named if len(start) > 1))
    return re.compile("|".join(map(re.escape, starts)) or "(?!)")


@lru_cache
def _tagged_ends(tool_format: ToolFormat) -> tuple[str, ...]:
    """Return the whole ends of calls in tags."""
    calls = (each.dialect.call for each in tool_format.readings if isinstance(each.dialect, Tags))
    return tuple(filter(None, (text_of(split_at(call, ARGUMENTS)[1]).strip() for call in calls)))


@lru_cache
def block_ends(tool_format: ToolFormat, opener: str) -> tuple[str, ...]:
    """Return the texts that end a block, and not just a call in it."""
    return tuple(
        dict.fromkeys(end for each in tool_format.readings_at(opener) for end in each.ends)
    )


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
    # From the beginning of a run of backticks only: from each of them takes quadratic time.
    return re.compile(rf"(?:(?<!`)|(?!`))(?:(?:{markers})\s*)+\Z")


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
    is_bare = _BARE.match(raw) is not None
    position = raw.find("{")
    while position >= 0:
        try:
            found = read_json(raw, position, ODD_QUOTES)
        except NotJsonError:
            call = None if is_bare else _broken_object(raw, position, names)
            if call is not None:
                yield call
            elif next(failures, None) is None:
                return
            position = raw.find("{", call.end if call else position + 1)
            continue
        call = _call_of(found, position, names, is_doubtful=is_bare)
        end = found.end
        if call is not None:
            call = _with_next(call, raw, names)
            end = call.end
            yield call
        is_around = call is None and found.members.keys() == {LIST_KEY}
        position = raw.find("{", position + 1 if is_around else end)


def _with_next(call: RepairedCall, raw: str, names: Names) -> RepairedCall:
    """Return a call that lacks its arguments with those in an object of their own after it."""
    types = names.parameter_types(call.name)
    begin = span_end(_BETWEEN, raw, call.end)
    if not (call.arguments == "{}" and types.required and raw.startswith("{", begin)):
        return call
    try:
        found = read_json(raw, begin, ODD_QUOTES)
    except NotJsonError:
        return call
    key, *others = (*found.members, "")
    is_wrapped = key in ARGUMENT_KEYS and key not in types.names and others == [""]
    given = found.members[key] if is_wrapped else found.text
    if not (given.startswith("{") and (is_wrapped or types.fit(found.members.keys()))):
        return call
    reasons = (*call.reasons, "arguments in another object")
    return replace(call, arguments=given, end=found.end, reasons=reasons, is_open=found.is_open)


def _call_of(
    found: Repaired, begin: int, names: Names, *, is_doubtful: bool
) -> RepairedCall | None:
    """Return the call that an object, which begins there, represents, if any."""
    fields = found.members
    for key in NESTING_KEYS:
        if fields.get(key, "").startswith("{"):
            fields = {**fields, **read_json(fields[key], 0).members}
    texts = (_text_in(fields[key]) for key in NAME_KEYS if key in fields)
    name = offered_name(next((text for text in texts if text is not None), "").strip(), names)
    given = next((fields[key] for key in ARGUMENT_KEYS if key in fields), "")
    if not name and len(fields) == 1:
        # The key is the name.
        [(key, given)] = fields.items()
        name = offered_name(key, names)
    if given in ("", "{}"):
        given = _members_beside(fields, name, names) or given
    if (text := _text_in(given)) is not None:
        given = _object_in(text) if text.strip() else "null"
    lacks_some = is_doubtful and bool(names.parameter_types(name).required)
    is_missing = given == "null" or not (given or lacks_some or found.is_open)
    is_sound = all(each.startswith(_OF_PYTHON) for each in found.reasons)
    if is_missing and is_sound and fields.keys() <= CALL_KEYS:
        given = "{}"
    if not (name and given.startswith("{")) or (is_doubtful and not fields.keys() <= CALL_KEYS):
        return None
    types = names.parameter_types(name)
    if types.names and describes_arguments(given, 0, types):
        return None
    return RepairedCall(name, given, begin, found.end, found.reasons, is_open=found.is_open)


def _members_beside(fields: Mapping[str, str], name: str, names: Names) -> str:
    """Return the arguments beside the name of a call as an object; nothing if there are others."""
    others = {key: value for key, value in fields.items() if key not in CALL_KEYS}
    types = names.parameter_types(name)
    if not others or not others.keys() <= {*types.names} or not types.fit(others.keys()):
        return ""
    return f"{{{', '.join(f'{json_string(key)}: {value}' for key, value in others.items())}}}"


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
    reasons = ("a damaged object",)
    return RepairedCall(name, arguments.text, position, arguments.end, reasons, arguments.is_open)


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
                named, stop = offset + body.rfind(name, 0, begin), offset + found.end
                yield RepairedCall(name, found.text, named, stop, found.reasons, found.is_open)
                position, name = found.end, ""
            begin = body.find("{", position)
        offset += len(part) + len(start)


@lru_cache
def _marks_at_end(dialect: NamedJson) -> re.Pattern[str]:
    """Return a pattern for the marks after the arguments of a call."""
    marks = "|".join(map(re.escape, call_ends(dialect))) or "(?!)"
    # From the beginning of white space only: from each of its characters takes quadratic time.
    return re.compile(rf"(?<!\s)\s*+(?:(?:{marks})\s*+)+\Z")


def _call_markers(dialect: NamedJson) -> tuple[str, str]:
    begin, end = split_at(dialect.call, ARGUMENTS)
    return text_of(begin[:1]).strip(), text_of(end[-1:]).strip().strip("`").strip()


def _literal_calls(
    quotes: tuple[str, ...],
    raw: str,
    names: Names,
    failures: Iterator[int],
    *,
    has_others: bool = False,
) -> Iterator[RepairedCall]:
    """Yield calls in brackets of any kind."""
    position = 0
    while found := _CALLED.search(raw, position):
        position = found.end()
        name = offered_name(found[1], names)
        if not (name or has_others):
            continue
        try:
            # A bracket unknown to the dialect counts as the known one, and may enclose an object.
            inner = _OBJECT.match(raw, found.end())
            is_round = raw[found.end() - 1] == "("
            is_json = inner is not None and is_round
            members = partial(read_members, closer=")") if is_round else read_members
            read = read_json if is_json else members
            arguments = read(raw, inner.start(1) if inner and is_json else found.end(), quotes)
        except NotJsonError:
            if next(failures, None) is None:
                return
            continue
        closer = _CLOSERS.match(raw, arguments.end)
        end = closer.end() if closer else arguments.end
        reasons = arguments.reasons or ("other brackets",)
        begin = found.start(1)
        if name:
            yield RepairedCall(name, arguments.text, begin, end, reasons, arguments.is_open)
        position = end


def _tagged_calls(
    dialect: Tags,
    raw: str,
    names: Names,
    failures: Iterator[int],
    *,
    is_cut: bool,
    is_odd: bool = False,
) -> Iterator[RepairedCall]:
    """Yield calls in tags, some of which are missing, repeated or wrong."""
    tags = TagWords(dialect)
    raw = tags.with_lines(raw)
    for begin, named, end, is_closed in (tags.odd_calls if is_odd else tags.calls)(raw, names):
        if is_odd and is_cut and not is_closed:
            return
        label, head_end = tags.name_at(raw, named)
        name = offered_name(label, names)
        head_end += tags.unwrapped_from(raw[head_end:end])
        body = _LAST_TAG.sub("", raw[head_end:end]) if is_odd else raw[head_end:end]
        types = names.parameter_types(name)
        is_own = raw.startswith(tags.call_begin, begin)
        arguments = dict(tags.arguments(body, types.names, is_own=is_own)) or {
            key: (text, "") for key, text in tags.attributes(raw, named, end, types.names).items()
        }
        if not arguments and "{" in body:
            moved = head_end - len(name) - 1
            found = _named_calls(None, f"{name} {body}", names, failures)
            for call in (each for each in found if each.name == name):
                stop = call.end + moved
                has_more = tags.has_other_text(raw[stop:end])
                yield replace(call, begin=begin, end=stop if has_more else end)
            continue
        if tags.has_other_text(body) if not arguments else is_cut and not tags.has_ended(body):
            return
        fields = (
            f"{json_string(key)}: {_value(text, kind, types, key, dialect)}"
            for key, (text, kind) in arguments.items()
        )
        text = f"{{{', '.join(fields)}}}"
        yield RepairedCall(name, text, begin, end, ("tags",), is_open=not is_closed)


def _value(text: str, kind: str, types: ParameterTypes, key: str, dialect: Tags) -> str:
    declared = types.of(key)
    if not kind or kind not in dialect.types.values():
        return repaired_value(text, declared)
    written = STRING if kind == dialect.types["string"] else NOT_A_STRING
    agreed = agreed_types(written, declared)
    is_text = declared == STRING != agreed
    return text_value(text, agreed) if is_text else repaired_value(text, agreed)
