"""The shapes of calls in tags."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from backend.formats.closing import ATTRIBUTE_BEGIN, TagEnds
from backend.formats.dialects import Reading, Tags
from backend.formats.template import (
    ARGUMENTS,
    KEY,
    VALUE,
    Part,
    Slot,
    Template,
    split_at,
    text_of,
)
from backend.output.readers.calls.tagged_dialect import ELEMENT_NAME, TaggedDialect
from backend.output.readers.patterns import (
    ATTRIBUTES,
    SPACE,
    SPACE_IN_LINE,
    Pattern,
    Piece,
    ahead,
    any_of,
    choice,
    fixed,
    maybe,
    sequence,
)
from backend.output.readers.values.elements import read_elements
from backend.output.readers.values.schema import NOT_A_STRING, STRING, JsonTypes, ParameterTypes
from backend.output.readers.values.typed_value import ValueWriter

_QUOTE = maybe(Piece("[\"']", "[\"']?"))
_WORD = any_of(r"[^\s<{]", group="name")
_KEY = any_of("[^<>\"'\n]", group="name")


def tagged_dialect(reading: Reading, dialect: Tags) -> TaggedDialect:
    """Return the tags of a dialect in the reader's form."""
    call, _ = split_at(dialect.call, ARGUMENTS)
    begin, end = split_at(dialect.parameter, VALUE)
    object_begin, object_end = split_at(dialect.object, ARGUMENTS) if dialect.object else ((), ())
    ends = TagEnds.of(reading, dialect)
    value_end, *other_ends = ends.ends
    return TaggedDialect(
        call=_pattern(call, dialect),
        call_begin=text_of(call[:1]),
        call_ends=ends.call_ends,
        parameter=_pattern(begin, dialect),
        parameter_begin=text_of(begin[:1]),
        value_begin=ends.value_begin,
        parameter_end=value_end or _element_end(end),
        block_ends=ends.block_ends,
        other_parameter_ends=tuple(other_ends),
        pads_values=text_of(begin).endswith("\n") and text_of(end).startswith("\n"),
        verbatim=dialect.verbatim,
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
        return Pattern((fixed(start), SPACE, _QUOTE, _KEY, _QUOTE, SPACE_IN_LINE, tag_end))
    if dialect.mark:
        return _element_pattern(start, dialect.misspelling)
    return Pattern((fixed(start), *_enclosed(rest, dialect.type_tag)))


def _attribute_pattern(head: Template, dialect: Tags) -> Pattern:
    """Return the pattern of a tag with attributes, in any order."""
    start, _, name_key = str(head[0]).removesuffix(ATTRIBUTE_BEGIN).rpartition(" ")
    *_, last = head
    kind_key = ""
    for before, part in pairwise(head):
        if part is Slot.TYPE:
            kind_key = str(before).removesuffix(ATTRIBUTE_BEGIN).rpartition(" ")[2]
    marker = "" if dialect.mark else start[: start.rfind("<")]
    return Pattern(
        (
            maybe(fixed(marker)),
            fixed(start.removeprefix(marker)),
            ATTRIBUTES,
            fixed(str(last).strip().removeprefix('"')),
        ),
        name_key=name_key,
        kind_key=kind_key,
        unescape=_unescape if dialect.escapes_attributes else str,
    )


def _element_pattern(start: str, misspelling: str) -> Pattern:
    """Return the pattern of an element, named after the argument or by an attribute."""
    tag = Piece(r"(?=(?P<tag>[^\s<>/]+))", "")
    as_attribute = maybe(fixed(misspelling))
    name = any_of(r"[^\s<>/\"']", group="name")
    return Pattern((fixed(start), tag, as_attribute, name, maybe(fixed('"')), fixed(">")))


def _enclosed(rest: Sequence[Part], type_tag: Template) -> Iterator[Piece]:
    """Yield the pieces after a tag that precedes a name, up to its end or to the next tag.

    Args:
        rest: The template after that tag.
        type_tag: A tag that may stand before the last one.
    """
    yield SPACE_IN_LINE
    is_key = KEY in rest
    yield any_of("[^<]", group="name") if is_key else _WORD
    markers = [part.strip() for part in rest if isinstance(part, str) and part.strip()]
    if len(markers) > 1:
        # One of the two tags between key and value may be missing.
        key_end, value = map(fixed, markers)
        yield SPACE
        without_value = choice(sequence(key_end, SPACE, Piece(r"(?=[^<\s])", "")))
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


def _element_end(end: Template) -> str:
    """Return the end of an element, with a group reference for its name."""
    return "".join(ELEMENT_NAME if part is KEY else str(part) for part in end).strip()


def _types(dialect: Tags) -> dict[str, JsonTypes]:
    """Return the JSON types by their spelling in tags."""
    if dialect.type_tag:
        return {"string": STRING, **dict.fromkeys(NOT_A_STRING, NOT_A_STRING)}
    kinds = dialect.types
    return {kind: STRING if name == "string" else NOT_A_STRING for name, kind in kinds.items()}


def _nested_value(mark: str, types: ParameterTypes, name: str) -> ValueWriter:
    convert = partial(read_elements, mark=mark, parts=types.inside(name))
    return ValueWriter(types.of(name), convert)


def _unescape(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")
