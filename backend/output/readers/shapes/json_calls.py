"""The shapes of calls whose arguments are JSON."""

import re
from collections.abc import Iterator

from backend.formats.dialects import NamedJson, Objects, Reading
from backend.formats.template import (
    ARGUMENTS,
    NAME,
    QUOTED_NAME,
    Characters,
    Id,
    Maybe,
    Part,
    Slot,
    Template,
    split_at,
    text_of,
)
from backend.output.readers.calls.call_block import CallBlock
from backend.output.readers.calls.named_call import CallHead
from backend.output.readers.calls.object_call import CallKeys
from backend.output.readers.patterns import (
    SPACE,
    Pattern,
    Piece,
    ahead,
    any_of,
    choice,
    fixed,
    grouped,
    maybe,
    sequence,
)

_KEY = re.compile(r'"(\w+)": "?$')
_CLOSERS = ("]", "}")
_FENCE = "```"
_JSON_FENCE = f"{_FENCE}json"
_ID = any_of(r"[^\s\[{<]", group="id")
_WORD = any_of(r"[^\s<>{}\[\]\"'`]", least=0, group="name")
_NAMES = {
    Slot.NAME: (any_of(r"[^\s<>{}\[\]\"'`]", group="name"),),
    Slot.QUOTED_NAME: (fixed('"'), any_of(r'[^"\\]', group="name"), fixed('"')),
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
        ends=_ends(reading),
        separators=(",", ";"),
        fillers=(*_CLOSERS, _FENCE),
    )


def named_block(reading: Reading, dialect: NamedJson) -> CallBlock:
    """Return the block of calls with names before their arguments."""
    begin, end = split_at(dialect.call, ARGUMENTS)
    inner_ends = [_bare((part,)) for part in end[:-1]]
    starts, separators = ("[",), (",",)
    return CallBlock(
        call=CallHead(
            patterns=tuple(pattern for template in dialect.calls for pattern in _heads(template)),
            loose=_loose_head(dialect.call),
            lead_ins=(_JSON_FENCE, _FENCE),
        ),
        call_start=begin[0] if isinstance(begin[0], str) else "",
        call_end=_bare(end[-1:]),
        starts=starts if dialect.is_list else (),
        ends=_ends(reading),
        separators=separators if dialect.is_list else (),
        fillers=(*_CLOSERS, _FENCE, *filter(None, inner_ends)),
    )


def _heads(template: Template) -> Iterator[Pattern]:
    """Yield the patterns between the beginning of a call and its arguments."""
    begin, _ = split_at(template, ARGUMENTS)
    head = begin[1:] if isinstance(begin[0], str) else begin
    yield Pattern((SPACE, *_head_pieces(head)))
    for part in head:
        if isinstance(part, Id) and NAME in part.template:
            # Only an id as the templates write it is kept.
            rest = head[head.index(part) + 1 :]
            end = part.template.index(NAME) + 1
            for name in (part.template, part.template[:end]):
                yield Pattern((SPACE, *_name_pieces(name), *_pieces_after_name(rest)))


def _loose_head(template: Template) -> Pattern | None:
    """Return the pattern of a head whose id is any word, in formats whose ids contain the name."""
    begin, _ = split_at(template, ARGUMENTS)
    for place, part in enumerate(begin):
        if isinstance(part, Id) and NAME in part.template:
            return Pattern((SPACE, _WORD, *_pieces_after_name(begin[place + 1 :])))
    return None


def _head_pieces(head: Template) -> Iterator[Piece]:
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
        yield grouped("id", *_id_pieces(named.template))
    elif isinstance(named, Slot):
        yield from _NAMES[named]
    yield from _pieces_after_name(head[name + 1 :])
    if named is QUOTED_NAME:
        yield SPACE
        yield ahead("{")


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
        yield ahead("{", _FENCE[0])


def _spaced(text: str) -> Iterator[Piece]:
    """Yield the words of a text, with any whitespace between them."""
    for word in text.split():
        yield fixed(word)
        yield SPACE


def _id_pieces(inner: Template) -> Iterator[Piece]:
    for part in inner:
        if isinstance(part, str):
            yield fixed(part)
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
    return text_of(template).replace(_JSON_FENCE, "").replace(_FENCE, "").strip()


def _ends(reading: Reading) -> tuple[str, ...]:
    return tuple(filter(None, (reading.end, *reading.other_ends)))


def _unique(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
