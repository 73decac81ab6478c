"""Builds the reader of a format's calls."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import assert_never

from backend.formats.closing import ATTRIBUTE_BEGIN, TagEnds, without_mark
from backend.formats.dialects import (
    ARGUMENTS,
    KEY,
    NAME,
    QUOTED_NAME,
    VALUE,
    Characters,
    Id,
    Literals,
    Markup,
    Maybe,
    Messages,
    NamedJson,
    Objects,
    Part,
    Reading,
    Slot,
    Tags,
    Template,
    filled,
    split_at,
    text_of,
)
from backend.formats.format import ToolFormat
from backend.formats.literal import PYTHONIC_CALLS
from backend.output.readers.bare_python import BarePythonReader, LiteralListReader
from backend.output.readers.json_calls import (
    FENCE,
    CallBlock,
    CallBlockReader,
    CallHead,
    CallKeys,
)
from backend.output.readers.literal_calls import (
    ASSIGNMENT,
    LiteralCallReader,
    LiteralDialect,
)
from backend.output.readers.literal_values import LiteralSyntax
from backend.output.readers.message_reader import MessageFrames, MessageReader
from backend.output.readers.patterns import (
    ATTRIBUTES,
    CLOSED,
    OTHER_ATTRIBUTES,
    SPACE,
    SPACE_IN_LINE,
    Pattern,
    Piece,
    ahead,
    any_of,
    choice,
    fixed,
    grouped,
    maybe,
    odd_names,
    sequence,
)
from backend.output.readers.reader import (
    USUAL_NAMESPACES,
    MakeReader,
    MarkupReader,
    Reader,
    ReaderContext,
    ReaderOutput,
)
from backend.output.readers.tagged_calls import (
    ELEMENT_NAME,
    TaggedDialect,
    TaggedReader,
)
from backend.output.readers.tolerant_json import NO_ARGUMENTS
from backend.output.readers.typed_values import (
    NOT_A_STRING,
    STRING,
    JsonTypes,
    ParameterTypes,
    ValueWriter,
    read_elements,
)
from backend.output.reply_format import warn_once

_KEY = re.compile(r'"(\w+)": "?$')
_CLOSERS = ("]", "}")
_JSON_FENCE = f"{FENCE}json"
_ID = any_of(r"[^\s\[{<]", group="id")
_WORD = any_of(r"[^\s<>{}\[\]\"'`]", least=0, group="name")
_PLAIN_NAME = any_of(r"[^\s<>{}\[\]\"'`]", group="name")
_NAMES = {
    Slot.NAME: (_PLAIN_NAME,),
    Slot.QUOTED_NAME: (
        fixed('"'),
        Piece(r'(?P<name>(?:[^"\\]|\\.)+)', r'(?:[^"\\]|\\.)*\\?'),
        fixed('"'),
    ),
    Slot.INDEX: (any_of(r"\d"),),
}


def object_block(reading: Reading, dialect: Objects) -> CallBlock:
    """Return the block of calls as objects, consecutive or in a list.

    Braces doubled as in a template, and a fence around the JSON, are ignored.
    """
    keys = dict(_keys(dialect.call))
    return CallBlock(
        call=CallKeys(
            names=_unique(keys[QUOTED_NAME], *CallKeys().names),
            arguments=_unique(keys[ARGUMENTS], *CallKeys().arguments),
            ids=(keys[Id],) if Id in keys else (),
        ),
        call_start="{",
        starts=("[", _JSON_FENCE),
        ends=reading.ends,
        separators=(",", ";"),
        fillers=(*_CLOSERS, FENCE),
    )


def _named_block(reading: Reading, dialect: NamedJson) -> CallBlock:
    """Return the block of calls with names before their arguments."""
    begin, end = split_at(dialect.call, ARGUMENTS)
    inner_ends = [_bare((part,)) for part in end[:-1]]
    starts, separators = ("[",), (",",)
    return CallBlock(
        call=CallHead(
            patterns=tuple(pattern for template in dialect.calls for pattern in _heads(template)),
            odd=partial(_odd_heads, dialect.calls),
            loose=_loose_head(dialect.call),
            lead_ins=(_JSON_FENCE, FENCE),
        ),
        call_start=begin[0] if isinstance(begin[0], str) else "",
        call_end=_bare(end[-1:]),
        starts=starts if dialect.is_list else (),
        ends=reading.ends,
        separators=separators if dialect.is_list else (),
        fillers=(*_CLOSERS, '"', FENCE, *filter(None, inner_ends)),
    )


def _heads(template: Template) -> Iterator[Pattern]:
    """Yield the patterns of a head."""
    head = _head(template)
    unescape = _json_text if QUOTED_NAME in head else str
    yield Pattern((SPACE, *_head_pieces(head)), unescape=unescape)
    for part in head:
        if isinstance(part, Id) and NAME in part.template:
            # Only an id as the templates write it is kept.
            rest = head[head.index(part) + 1 :]
            end = part.template.index(NAME) + 1
            for name in (part.template, part.template[:end]):
                yield Pattern((SPACE, *_name_pieces(name), *_pieces_after_name(rest)))


@lru_cache
def _odd_heads(calls: tuple[Template, ...], names: tuple[str, ...]) -> tuple[Pattern, ...]:
    """Return the patterns of heads with those names that no other pattern reads."""
    plain = re.compile(_PLAIN_NAME.whole)
    name = odd_names(names, lambda each: plain.fullmatch(each) is not None)
    heads = map(_head, calls) if name else ()
    return tuple(
        Pattern((SPACE, *_head_pieces(head, name))) for head in heads if QUOTED_NAME not in head
    )


def _head(call: Template) -> Template:
    """Return the parts between the beginning of a call and its arguments."""
    begin, _ = split_at(call, ARGUMENTS)
    return begin[1:] if isinstance(begin[0], str) else begin


def _json_text(written: str) -> str:
    """Return the text of a JSON string without its quotes; itself if it is none."""
    try:
        return str(json.loads(f'"{written}"'))
    except ValueError:
        return written


def _loose_head(template: Template) -> Pattern | None:
    """Return the pattern of a head whose id is any word, in formats whose ids contain the name."""
    begin, _ = split_at(template, ARGUMENTS)
    for place, part in enumerate(begin):
        if isinstance(part, Id) and NAME in part.template:
            after_name = _pieces_after_name(begin[place + 1 :])
            return Pattern((SPACE, _WORD, *after_name), may_lack_name=True)
    return None


def _head_pieces(head: Template, name_piece: Piece | None = None) -> Iterator[Piece]:
    name = next(place for place, part in enumerate(head) if _holds_name(part))
    for part in head[:name]:
        if isinstance(part, Id):
            yield maybe(_ID)
        elif isinstance(part, Characters):
            yield maybe(Piece(part.pattern, part.pattern.replace("{1,", "{0,")))
        else:
            yield maybe(*_spaced(text_of((part,))))
        yield SPACE
    named = head[name]
    if isinstance(named, Id):
        yield grouped("id", *_id_pieces(named.template, name_piece))
    elif isinstance(named, Slot):
        yield from (name_piece,) if name_piece else _NAMES[named]
    yield from _pieces_after_name(head[name + 1 :])
    if named is QUOTED_NAME:
        yield SPACE
        yield ahead("{", '"', *NO_ARGUMENTS)


def _holds_name(part: Part) -> bool:
    names = (NAME, QUOTED_NAME)
    return part in names or (isinstance(part, Id) and NAME in part.template)


def _pieces_after_name(rest: Template) -> Iterator[Piece]:
    """Yield the pieces between a name and arguments: a marker, or the start of the arguments."""
    has_marker = False
    for part in rest:
        if isinstance(part, Maybe):
            yield maybe(SPACE, *_optional_pieces(part.template), SPACE)
        elif marker := _bare((part,)):
            has_marker = True
            yield SPACE
            yield choice(sequence(*_spaced(marker)), ahead("{"))
    if not has_marker:
        yield SPACE
        yield ahead("{", '"', FENCE[0], *NO_ARGUMENTS)


def _spaced(text: str) -> Iterator[Piece]:
    """Yield the words of a text, with any whitespace between them."""
    for word in text.split():
        yield fixed(word)
        yield SPACE


def _id_pieces(inner: Template, name_piece: Piece | None = None) -> Iterator[Piece]:
    for part in inner:
        if isinstance(part, str):
            yield fixed(part)
        elif part is NAME and name_piece:
            yield name_piece
        elif isinstance(part, Slot):
            yield from _NAMES[part]


def _name_pieces(inner: Template) -> Iterator[Piece]:
    """Yield the pieces of an id whose beginning may be missing."""
    first, *rest = inner
    yield maybe(*_id_pieces((first,)))
    yield from _id_pieces(tuple(rest))


def _optional_pieces(inner: Template) -> Iterator[Piece]:
    for part in inner:
        if isinstance(part, str):
            yield fixed(part)
            yield SPACE
        elif isinstance(part, Id):
            yield _ID


def _keys(template: Template) -> Iterator[tuple[object, str]]:
    """Yield the parts of an object, each with its key."""
    before = ""
    for part in template:
        if isinstance(part, Maybe):
            yield from _keys(part.template)
        elif isinstance(part, str):
            before = part
        elif found := _KEY.search(before):
            yield (Id if isinstance(part, Id) else part), found[1]


def _bare(template: Template) -> str:
    """Return the text of a template without whitespace and fences."""
    return text_of(template).replace(_JSON_FENCE, "").replace(FENCE, "").strip()


def _unique(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


_BRACKETS = {"{": "}", "[": "]"}
_LITERAL_WORD = re.compile(r"[\w.+-]*")


def literal_dialect(reading: Reading, dialect: Literals) -> LiteralDialect:
    """Return the brackets and quotes of a dialect in the reader's form."""
    call, call_end = split_at(dialect.call, ARGUMENTS)
    begin, bracket = (text_of(part) for part in split_at(call, NAME))
    assign = text_of(split_at(dialect.argument, KEY)[1]).strip()
    return LiteralDialect(
        call=_call_pattern(begin, bracket, dialect.before, is_script=dialect.is_script),
        odd_call=partial(_odd_call, begin, bracket, dialect.before),
        before=dialect.before,
        call_begin=begin,
        call_end=text_of(call_end),
        key=_key_pattern(dialect, assign),
        other_key=_other_key(dialect),
        assign=assign,
        syntax=_syntax(dialect, bracket, reading.ends),
        block_end=reading.end,
        other_block_ends=reading.other_ends,
        has_positions=dialect.has_positions,
        is_script=dialect.is_script,
    )


def _call_pattern(
    begin: str, bracket: str, before: Sequence[str], *, is_script: bool = False
) -> Pattern:
    if begin:
        name = any_of(r"[^\s,<>(){}]", group="name")
        return Pattern((fixed(begin), SPACE, name, SPACE, fixed(bracket)))
    # Possessive, so that none of them becomes a name while the text grows.
    first = [Piece(f"{maybe(fixed(text)).whole}+", fixed(text).begun) for text in before]
    if is_script:
        first.insert(0, ASSIGNMENT)
    is_name = Piece(r"(?=\w)", "")
    return Pattern((*first, is_name, any_of(r"[\w./:-]", group="name"), fixed(bracket)))


@lru_cache
def _odd_call(
    begin: str, bracket: str, before: tuple[str, ...], names: tuple[str, ...]
) -> Pattern | None:
    """Return the pattern of calls with those names that `_call_pattern` does not read."""
    plain = _call_pattern(begin, bracket, before)
    name = odd_names(names, lambda each: plain.match(f"{begin}{each}{bracket}").name == each)
    return Pattern((fixed(begin), name, fixed(bracket))) if name else None


def _key_pattern(dialect: Literals, assign: str) -> Pattern:
    if dialect.has_bare_text:
        quote = maybe(choice(*map(fixed, dialect.quotes)))
        name = any_of(r"""[^\s:,<>"'{}\[\]=]""", group="name")
        return Pattern((SPACE, quote, name, quote, SPACE, fixed(assign)))
    return Pattern((any_of(r"\w", group="name"), SPACE, fixed(assign)))


def _other_key(dialect: Literals) -> Pattern:
    """Return the pattern of a key with another sign after it, or one in quotes."""
    if dialect.has_bare_text:
        return _key_pattern(dialect, "=")
    name = any_of(r"\w", group="name")
    quote = choice(fixed('"'), fixed("'"))
    return Pattern((quote, name, quote, SPACE, choice(fixed(":"), fixed("="))))


def _syntax(dialect: Literals, bracket: str, block_ends: Sequence[str]) -> LiteralSyntax:
    ends = "".join(sorted({re.escape(end[0]) for end in block_ends}))
    firsts = "".join(sorted({re.escape(quote[0]) for quote in dialect.quotes}))
    has_bare_text = dialect.has_bare_text
    begin = text_of(split_at(dialect.call, NAME)[0])
    return LiteralSyntax(
        quotes=dialect.quotes,
        plain=re.compile(rf"[^{firsts}\\{',' if has_bare_text else ''}]*"),
        bare=re.compile(rf"[^,{{}}\[\]{ends}]*") if has_bare_text else _LITERAL_WORD,
        bare_key=re.compile(rf"[^:,{firsts}{{}}\[\]]*") if has_bare_text else _LITERAL_WORD,
        brackets=_BRACKETS | ({"(": ")"} if bracket == "(" else {}),
        has_escapes=dialect.has_escapes,
        format_plain=re.compile(rf"[^{firsts}\\{{}}]*"),
        has_bare_text=has_bare_text,
        call_begin=begin,
        inner_call=re.compile(rf"{re.escape(begin)}[^\s{{}}]+\{bracket}[^{{}}]*\Z")
        if begin
        else None,
        block_end=next(iter(block_ends), ""),
    )


_QUOTE = maybe(Piece("[\"']", "[\"']?"))
_TAG_WORD = any_of(r"[^\s<{]", group="name")
_TAG_KEY = any_of("[^<>\"'\n]", group="name")


def tagged_dialect(reading: Reading, dialect: Tags) -> TaggedDialect:
    """Return the tags of a dialect in the reader's form."""
    call, _ = split_at(dialect.call, ARGUMENTS)
    begin, end = split_at(dialect.parameter, VALUE)
    object_begin, object_end = split_at(dialect.object, ARGUMENTS) if dialect.object else ((), ())
    ends = TagEnds.of(reading, dialect)
    value_end, *other_ends = ends.ends
    return TaggedDialect(
        call=_pattern(call, dialect),
        odd_call=partial(_odd_pattern, call, dialect),
        unmarked_call=_unmarked_pattern(call, dialect),
        quoted_call=_quoted_pattern(call, dialect),
        call_begin=text_of(call[:1]),
        call_ends=ends.call_ends,
        parameter=_pattern(begin, dialect),
        odd_parameter=partial(_odd_pattern, begin, dialect),
        other_parameters=tuple(_other_parameters(begin, dialect)),
        quoted_parameter=_quoted_pattern(begin, dialect),
        parameter_begin=text_of(begin[:1]),
        unopened_parameter=_unopened_pattern(call, begin) if ends.key_end else None,
        nameless_parameter=_nameless_pattern(begin),
        key_end=ends.key_end,
        value_begin=ends.value_begin,
        parameter_end=value_end or filled(end, {KEY: ELEMENT_NAME}).strip(),
        block_ends=ends.block_ends,
        other_parameter_ends=tuple(other_ends),
        has_element_ends=ends.has_elements,
        pads_values=dialect.pads_values,
        verbatim=dialect.verbatim,
        is_inline=dialect.is_inline,
        requires_ends=dialect.requires_ends,
        types=_types(dialect),
        make_value=partial(_nested_value, dialect.mark) if dialect.mark else None,
        json_begin=_pattern(object_begin, dialect) if dialect.object else None,
        json_end=text_of(object_end).strip(),
    )


def _pattern(head: Template, dialect: Tags) -> Pattern:
    """Return the pattern of an opening tag."""
    first, *rest = head
    start = str(first)
    if start.endswith(ATTRIBUTE_BEGIN):
        return _attribute_pattern(head, dialect)
    if start.endswith("="):
        tag_end = choice(fixed(">"), ahead("\n"))
        key = (_QUOTE, _TAG_KEY, _QUOTE, OTHER_ATTRIBUTES)
        return Pattern((fixed(start), SPACE, *key, SPACE_IN_LINE, tag_end))
    if start.endswith("<"):
        return _element_pattern(start, dialect.misspelling)
    # Models repeat the tag before a key.
    again = (maybe(SPACE, fixed(start)),) if KEY in rest else ()
    return Pattern((fixed(start), *again, *_enclosed(rest, dialect.type_tag)))


def _unmarked_pattern(head: Template, dialect: Tags) -> Pattern | None:
    """Return the pattern of an opening tag that lacks the mark of its family, if there is one."""
    first, *rest = head
    plain = without_mark(str(first))
    return None if plain == first else _pattern((plain, *rest), dialect)


def _other_parameters(begin: Template, dialect: Tags) -> Iterator[Pattern]:
    """Yield the patterns of an opening tag as models write it in place of the correct one."""
    if unmarked := _unmarked_pattern(begin, dialect):
        yield unmarked
    for other in dialect.other_parameters:
        yield _pattern(split_at(other, VALUE)[0], dialect)
    if (start := str(begin[0])).endswith("="):
        # A sign in place of the end of the tag.
        sign = choice(fixed(":"), fixed("="))
        name = any_of(r"[^\s<>:=\"']", group="name")
        yield Pattern((fixed(start), SPACE_IN_LINE, name, SPACE_IN_LINE, sign, SPACE_IN_LINE))


_ESCAPED_QUOTE = (any_of(r"\\"), choice(fixed('"'), fixed("'")))


def _quoted_pattern(head: Template, dialect: Tags) -> Pattern | None:
    """Return the pattern of a tag with attributes in a string of code, which escapes quotes."""
    if not str(head[0]).endswith(ATTRIBUTE_BEGIN):
        return None
    start, _, name_key = str(head[0]).removesuffix(ATTRIBUTE_BEGIN).rpartition(" ")
    name = any_of(r"[^\s\"'<>\\]", group="name")
    others = any_of(r"[^<>\n]", least=0)
    return Pattern(
        (
            *(*_after_markers(start, dialect), SPACE, fixed(f"{name_key}=")),
            *(*_ESCAPED_QUOTE, name, *_ESCAPED_QUOTE, others),
            fixed(str(head[-1]).strip().removeprefix('"')),
        )
    )


def _unopened_pattern(call: Template, begin: Template) -> Pattern:
    """Return the pattern of a key and a value's tag, perhaps after the tag of a call."""
    key_end, value = (part.strip() for part in begin[1:] if isinstance(part, str))
    key = (SPACE_IN_LINE, any_of(r"[^<\s]", group="name"), fixed(key_end), SPACE, fixed(value))
    return Pattern((maybe(fixed(text_of(call[:1]))), *key))


def _nameless_pattern(begin: Template) -> Pattern | None:
    """Return the pattern of the tag of an argument without its name, `<parameter=>`."""
    start = str(begin[0])
    if not start.endswith("=") or len(begin) < 2:
        return None
    name, tag_end = Piece("(?P<name>)", ""), maybe(fixed(">"))
    return Pattern((fixed(start), name, SPACE_IN_LINE, tag_end, ahead("\n")), may_lack_name=True)


_MARKER_PART = re.compile(r"<[^<>]*>|[^<>]+")


def _attribute_pattern(head: Template, dialect: Tags) -> Pattern:
    """Return the pattern of a tag with attributes, in any order."""
    start, _, name_key = str(head[0]).removesuffix(ATTRIBUTE_BEGIN).rpartition(" ")
    *_, last = head
    keys = {part: _attribute_key(before) for before, part in pairwise(head)}
    last_text = str(last).strip().removeprefix('"')
    end = (*((CLOSED,) if last_text == ">" else ()), fixed(last_text))
    return Pattern(
        (
            *_after_markers(start, dialect),
            ATTRIBUTES,
            *end,
        ),
        name_key=name_key,
        kind_key=keys.get(Slot.TYPE, ""),
        own_keys=tuple(keys.values()),
        unescape=_unescape if dialect.escapes_attributes else str,
    )


def _attribute_key(before: Part) -> str:
    """Return the attribute at the end of the text before a slot."""
    return str(before).removesuffix(ATTRIBUTE_BEGIN).rpartition(" ")[2]


def _after_markers(start: str, dialect: Tags) -> Iterator[Piece]:
    """Yield the pieces of the beginning of a tag, after markers that belong to it."""
    marker = "" if dialect.mark else start[: start.rfind("<")]
    # Models leave out the whole marker, or a part of it.
    yield from (maybe(fixed(part), SPACE) for part in _MARKER_PART.findall(marker))
    yield fixed(start.removeprefix(marker))


@lru_cache
def _odd_pattern(head: Template, dialect: Tags, names: tuple[str, ...]) -> Pattern | None:
    """Return the pattern of those names that the pattern of an opening tag does not read."""
    plain = _pattern(head, dialect)

    def is_read(name: str) -> bool:
        spelled = dialect.spelled(name)
        # The beginning of the next line follows.
        text = filled(head, {NAME: spelled, KEY: spelled, Slot.INDEX: "0"}).rstrip() + "\n"
        return plain.match(text).name == name or name != name.strip()

    name = odd_names(names, is_read, dialect.spelled)
    if name is None:
        return None
    pieces = _exact(head, grouped("tag", name), dialect)
    return Pattern(tuple(pieces), unescape=_unescape if dialect.escapes_attributes else str)


def _exact(head: Template, name: Piece, dialect: Tags) -> Iterator[Piece]:
    """Yield the pieces of an opening tag as it is written, except for whitespace."""
    first, *rest = head
    yield from _after_markers(str(first), dialect)
    for part in rest:
        if part in (NAME, KEY):
            yield name
        elif part is Slot.TYPE:
            yield any_of(r"[^\s\"<>]", group="kind")
        elif part is Slot.INDEX:
            yield any_of(r"\d")
        elif isinstance(part, str):
            yield from (SPACE, fixed(part.strip()))
        elif dialect.type_tag:
            yield maybe(SPACE, *_type_pieces(dialect.type_tag))
    if not isinstance(head[-1], str):
        yield from (SPACE_IN_LINE, ahead("\n", "<", "{"))


def _element_pattern(start: str, misspelling: str) -> Pattern:
    """Return the pattern of an element, named after the argument or by an attribute."""
    tag = Piece(r"(?=(?P<tag>[^\s<>/]+))", "")
    as_attribute = maybe(fixed(misspelling))
    name = any_of(r"[^\s<>/\"']", group="name")
    return Pattern((fixed(start), tag, as_attribute, name, maybe(fixed('"')), fixed(">")))


def _enclosed(rest: Sequence[Part], type_tag: Template) -> Iterator[Piece]:
    """Yield the pieces after a tag up to the next one; a `type_tag` may stand before the last."""
    yield SPACE_IN_LINE
    is_key = KEY in rest
    yield any_of("[^<]", group="name") if is_key else _TAG_WORD
    markers = [part.strip() for part in rest if isinstance(part, str) and part.strip()]
    if len(markers) > 1:
        # One of the two tags between key and value may be missing, or the first be there twice.
        key_end, value = map(fixed, markers)
        key_end = sequence(key_end, maybe(SPACE, key_end))
        yield SPACE
        without_value = choice(sequence(key_end, SPACE, Piece(r"(?=[^<\s\\])", "")))
        kind = [maybe(*_type_pieces(type_tag))] if type_tag else []
        yield choice(sequence(maybe(key_end), SPACE, *kind, value), without_value)
    elif markers:
        yield SPACE
        yield fixed(markers[0])
    else:
        yield SPACE_IN_LINE
        yield ahead("\n", "<", "{")


def _type_pieces(type_tag: Template) -> Iterator[Piece]:
    begin, end = split_at(type_tag, Slot.TYPE)
    yield from (fixed(text_of(begin)), SPACE, any_of(r"[^<\s]", group="kind"), SPACE)
    yield from (fixed(text_of(end)), SPACE)


def _types(dialect: Tags) -> dict[str, JsonTypes]:
    if dialect.type_tag:
        return {"string": STRING, **dict.fromkeys(NOT_A_STRING, NOT_A_STRING)}
    kinds = dialect.types
    return {kind: STRING if name == "string" else NOT_A_STRING for name, kind in kinds.items()}


def _nested_value(mark: str, types: ParameterTypes, name: str) -> ValueWriter:
    convert = partial(read_elements, mark=mark, parts=types.inside(name))
    return ValueWriter(types.of(name), convert)


def _call_heads(calls: Reading | None) -> tuple[Pattern | None, ...]:
    """Return the patterns of the beginning of a call in tags."""
    if calls is None or not isinstance(calls.dialect, Tags):
        return ()
    head, _ = split_at(calls.dialect.call, ARGUMENTS)
    return (_pattern(head, calls.dialect), _unmarked_pattern(head, calls.dialect))


def _unescape(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")


class ChoiceReader:
    """Waits after the opener until a dialect is chosen, then delegates to its reader."""

    def __init__(
        self, context: ReaderContext, *, choices: Mapping[str, MakeReader], otherwise: MakeReader
    ) -> None:
        self._context = context
        self._choices = choices
        self._otherwise = otherwise
        self._waiting = ""
        self._reader: Reader | None = None

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._reader.held if self._reader else self._context.opener + self._waiting

    @property
    def is_mid_call(self) -> bool:
        """Whether the chosen reader is in a call; before the choice, a call is pending."""
        return self._reader is None or self._reader.is_mid_call

    def feed(self, text: str) -> ReaderOutput:
        """Choose a reader, or let it read."""
        if self._reader is not None:
            return self._reader.feed(text)
        text = self._waiting + text
        begin = text.lstrip()
        if any(start.startswith(begin) and start != begin for start in self._choices):
            self._waiting = text
            return ReaderOutput()
        return self._choose(begin).feed(text)

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End, with or without a chosen reader."""
        if self._reader is not None:
            return self._reader.finish(truncated=truncated)
        return ReaderOutput(rejected="" if truncated else self.held)

    def _choose(self, begin: str) -> Reader:
        chosen = (make for start, make in self._choices.items() if begin.startswith(start))
        self._reader = next(chosen, self._otherwise)(self._context)
        return self._reader


def make_reader(tool_format: ToolFormat, context: ReaderContext) -> Reader:
    """Return the reader of the text after an opener."""
    opener = context.opener
    if tool_format.name_lead and opener not in (*tool_format.openers, *tool_format.leads):
        opener = tool_format.name_lead
    return _reader_at(tool_format, opener)(context)


@lru_cache
def _reader_at(tool_format: ToolFormat, opener: str) -> MakeReader:
    readings = tool_format.readings_at(opener)
    choices = {begin: _factory(reading) for reading in readings for begin in reading.begins}
    otherwise = _factory(fallback := tool_format.fallback_at(opener))
    texts = (*tool_format.openers, *tool_format.closers, *tool_format.leaks, FENCE)
    marks = tuple(text for text in texts if len(text) > 1)
    if isinstance(fallback.dialect, NamedJson) and opener == tool_format.name_lead:
        block = _named_block(fallback, fallback.dialect)
        otherwise = partial(CallBlockReader, block=block, opener_is_call=True)
    if isinstance(fallback.dialect, Literals) and opener in ("[", tool_format.name_lead):
        otherwise = partial(BarePythonReader, make_reader=otherwise, marks=marks)
    if opener == "[" and isinstance(fallback.dialect, Objects):
        # All models lapse into Python too.
        choices = {**dict.fromkeys(("{", "["), otherwise), **choices}
        calls = replace(PYTHONIC_CALLS, before=tuple(f"{each}." for each in USUAL_NAMESPACES))
        dialect = literal_dialect(Reading(calls), calls)
        otherwise = partial(LiteralListReader, dialect=dialect, marks=marks)
    if not choices:
        return otherwise
    return partial(ChoiceReader, choices=choices, otherwise=otherwise)


def _factory(reading: Reading) -> Callable[[ReaderContext], Reader]:
    dialect = reading.dialect
    match dialect:
        case Objects():
            return partial(CallBlockReader, block=object_block(reading, dialect))
        case NamedJson():
            return partial(CallBlockReader, block=_named_block(reading, dialect))
        case Tags():
            return partial(TaggedReader, dialect=tagged_dialect(reading, dialect))
        case Literals():
            return partial(LiteralCallReader, dialect=literal_dialect(reading, dialect))
        case Markup(text):
            return partial(MarkupReader, markup=text)
        case Messages(calls=calls):
            make_block = _factory(calls) if calls else None
            frames = MessageFrames(dialect, make_block, warn_once, _call_heads(calls))
            return partial(MessageReader, frames=frames)
        case _:
            assert_never(dialect)
