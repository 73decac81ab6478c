"""Where a value without escapes ends: one rule for readers and grammars.

A value may contain its own end. An end counts only where structure follows, after whitespace. In
tags that is the tag of another argument, the end of the call or of its block, or the next call; a
doubled end is one, and the tag of an argument that its value repeats is not in the value. Families
whose models mix up tags also take the tags of each other for an argument that is declared and not
yet given, and an end named after the argument, `</a>`; grammars, which do not know the argument,
refuse any such name there. Where models forget ends, a value also ends before an argument that is
declared and not yet given, and before the end of a call that something confirms. After a quote it
is the key of another argument, or the end of the call, and either counts without a quote that is
missing; inside brackets a comma or the bracket.

Readers apply the rule to text that is still growing, and look closer at the text after an end.
Grammars refuse a value with a sequence in it that may end it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from backend.formats.dialects import (
    ARGUMENTS,
    KEY,
    VALUE,
    Characters,
    Literals,
    Reading,
    Tags,
    Template,
    split_at,
    text_of,
)

ATTRIBUTE_BEGIN = '="'

_SPACE_CHARS = r"[\s\x1C-\x1F]"
_GAP, _SPACE = Characters(f"{_SPACE_CHARS}*"), Characters(_SPACE_CHARS)
_ELEMENT_END = ("</", Characters(r"[^\s\x1C-\x1F<>]*"), ">")
_KEY = Characters(r"[^\s\x1C-\x1F<]+")
_NAME_START = Characters(r"[^\s\x1C-\x1F\x21\x2F<=>?]")


@dataclass(frozen=True, slots=True)
class Limits:
    """The texts that a value cannot contain, because readers could not tell them from structure.

    The parts of each sequence are fixed texts and `Characters`.

    Attributes:
        inside: Sequences that do not occur in a value.
        first: Sequences that it does not begin with.
        last: Sequences that it does not end with.
        markers_decide: Whether the first token after `Characters` in a sequence inside is enough,
            whatever follows: such tokens are rare in text.
        tags: Tags that strings in JSON do not contain; each has one "<", at its beginning.
    """

    inside: tuple[Template, ...] = ()
    first: tuple[Template, ...] = ()
    last: tuple[Template, ...] = ()
    markers_decide: bool = False
    tags: tuple[str, ...] = ()

    def found_in(self, text: str) -> str:
        """Return the first part of a text that it cannot contain, or an empty string."""
        found = (pattern.search(text) for pattern in _patterns(self))
        return next((each[0] for each in found if each), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TagEnds:
    """The texts that decide where a value in tags ends.

    Attributes:
        ends: The end of a value, and other texts that models write for it.
        block_ends: Texts that end a block of calls, in formats with blocks.
        begins: Beginnings of arguments, each up to the place of the key.
        calls: Beginnings of calls, each up to the place of the name.
        key_end: The tag after a key, if there is one.
        value_begin: The tag before a value, if it differs from the argument's.
        other_begins: Beginnings of arguments in other tags, which count after the end of a value.
        has_elements: Whether models name tags after arguments, of which grammars know no more than
            their brackets.
    """

    ends: tuple[str, ...]
    call_ends: tuple[str, ...]
    block_ends: tuple[str, ...]
    begins: tuple[Template, ...]
    calls: tuple[Template, ...]
    key_end: str
    value_begin: str
    other_begins: tuple[Template, ...]
    has_elements: bool

    @classmethod
    def of(cls, reading: Reading, tags: Tags) -> "TagEnds":
        """Return the texts of a dialect; an end named after its argument is not among them."""
        begin, end = split_at(tags.parameter, VALUE)
        call, call_end = split_at(tags.call, ARGUMENTS)
        value_end, last_end = "" if KEY in end else text_of(end).strip(), text_of(call_end).strip()
        return cls(
            ends=(value_end, *_without_mark(value_end), *_damaged(value_end)),
            call_ends=(last_end, *_other_ends(last_end), *tags.other_call_ends),
            block_ends=tuple(dict.fromkeys(reading.ends)),
            begins=(_tag_start(begin),),
            calls=tuple(dict.fromkeys((_tag_start(call), _last_tag(_tag_start(call))))),
            key_end=_key_end(begin),
            value_begin=_value_begin(begin),
            other_begins=tuple(map(_other_start, tags.other_parameters)),
            has_elements=any(map(_is_element, tags.other_parameters)),
        )

    def limits(self, tags: Tags, opener: str, after: Template) -> Limits:
        """Return the limits of a value.

        Args:
            after: The text after the arguments. If the end of a block is part of it, the end of a
                call counts only together with that, as for readers.
        """
        if tags.mark:
            return Limits(inside=((tags.mark,),), tags=(_one_tag(tags.mark),))
        marks, (begin, end) = self.ends, tags.verbatim
        if begin:
            marks = (end + marks[0],)
        last = text_of(after)
        is_whole = any(end in last for end in self.block_ends)
        call_ends = self._call_ends(tags, opener) if is_whole else zip(self.call_ends)
        block_ends = zip(self.block_ends)
        follows = (*self.begins, *self.calls, *call_ends, *block_ends)
        if not _begins_call(tags, opener):
            follows = (*follows, *((opener, _GAP, *call) for call in self.calls))
        if self.key_end:
            # The tag of the key may be missing.
            follows = (*follows, (_KEY, self.key_end))
        inside = [(mark, _GAP, *each) for mark in marks for each in (*follows, *self.other_begins)]
        inside += [(*_ELEMENT_END, _GAP, *follow) for follow in follows if self.has_elements]
        if not (begin or tags.requires_ends):
            inside += [*self._call_ends(tags, opener), *self._bare_begins(tags)]
        return Limits(
            inside=tuple(inside),
            first=((self.value_begin,),) if self.value_begin else (),
            last=tuple((mark.rstrip("\n"), _GAP) for mark in marks),
            markers_decide=True,
            tags=tuple(dict.fromkeys(map(_one_tag, self._all_tags()))),
        )

    def _all_tags(self) -> Iterator[str]:
        yield from (*self.ends, *self.call_ends, *self.block_ends)
        yield from (str(begin[0]) for begin in self.begins)

    def _call_ends(self, tags: Tags, opener: str) -> Iterator[Template]:
        """Yield the ends of a call, each with a text that confirms it."""
        follows: tuple[Template, ...] = ((opener,), *((end,) for end in self.block_ends))
        if not _begins_call(tags, opener):
            follows = (*follows, *self.calls)
        yield from ((end, _GAP, *follow) for end in self.call_ends for follow in follows)

    def _bare_begins(self, tags: Tags) -> Iterator[Template]:
        """Yield the beginnings of arguments that may follow such a value."""
        key = Characters(r"[^<>\n]+")
        for begin in self.begins:
            if self.value_begin:
                yield (*begin, key, self.key_end)
                yield (*begin, key, self.value_begin)
            elif tags.is_inline:
                yield begin
            else:
                yield (f"\n{begin[0]}", *begin[1:])


def quote_limits(literals: Literals, reading: Reading, opener: str) -> Limits:
    """Return the limits of a text in the format's own quotes, as the value of an argument."""
    call, call_end = split_at(literals.call, ARGUMENTS)
    assign = text_of(split_at(literals.argument, KEY)[1]).strip()
    quote, end = literals.quotes[0], text_of(call_end)
    # Where a text may lack its quotes, readers know a key by this sign too.
    signs = Characters(f"[{_literal_char(assign)}=]") if literals.has_bare_text else assign
    key = Characters(r"[^\s\x1C-\x1F:,<>\x22{}\[\]]+")
    comma = (quote, _GAP, ",", _GAP)
    last = (quote, _GAP, end, Characters(r"[\s\x1C-\x1F)\]}]*"))
    marks = (Characters(r"\x22?"), quote)
    keys: list[Template] = [
        (*comma, mark, key, after, _GAP, signs) for mark in marks for after in marks
    ]
    # Without a comma, and without the quote before it: then another one begins the next text.
    bare = (_GAP, key, _GAP, signs)
    keys += [(quote, *bare), (",", *bare, quote)]
    ends = [(*last, text) for text in ("]", reading.end, opener, text_of(call[:1]))]
    calls = [(*last, ",", _GAP, text) for text in ("]", reading.end, opener, text_of(call[:1]))]
    lost = ((end, _GAP, reading.end), (quote, _GAP, reading.end))
    return Limits((*keys, *ends, *calls, (*comma, end), *lost), first=((quote,),), last=((quote,),))


def bracket_limits(literals: Literals, reading: Reading, bracket: str) -> Limits:
    """Return the limits of a text in the format's own quotes inside brackets."""
    quote = literals.quotes[0]
    inside = tuple((quote, _GAP, text) for text in (",", bracket, reading.end))
    return Limits(inside, first=((quote,),), last=((quote,),))


def literal(text: str) -> str:
    """Return a text as a regular expression, in syntax common to Python and llguidance."""
    return "".join(map(_literal_char, text))


def _literal_char(char: str) -> str:
    return f"\\x{ord(char):02X}" if char.isascii() and not char.isalnum() else char


def _regex(sequence: Template) -> str:
    return "".join(
        part.pattern if isinstance(part, Characters) else literal(str(part)) for part in sequence
    )


@lru_cache(maxsize=256)
def _patterns(limits: Limits) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of all that a value cannot contain, in order."""
    placed = ((limits.inside, "{}"), (limits.first, r"\A{}"), (limits.last, r"{}\Z"))
    return tuple(
        re.compile(form.format(_regex(sequence)))
        for sequences, form in placed
        for sequence in sequences
    )


def _one_tag(text: str) -> str:
    """Return the part of a text that starts with its only "<"."""
    begin = text.index("<")
    end = text.find("<", begin + 1)
    return text[begin:] if end < 0 else text[begin:end]


def _tag_start(head: Template) -> Template:
    """Return the beginning of a tag up to the place of the name, which may be an attribute."""
    start = str(head[0])
    if start.endswith(ATTRIBUTE_BEGIN):
        return (start.removesuffix(ATTRIBUTE_BEGIN).rpartition(" ")[0], _SPACE)
    return (start,)


def _begins_call(tags: Tags, opener: str) -> bool:
    """Tell whether an opener is the beginning of a call, which then has no block around it."""
    return text_of(tags.call[:1]).startswith(opener)


def _is_element(parameter: Template) -> bool:
    """Tell whether an argument is an element named after itself."""
    return KEY in split_at(parameter, VALUE)[1]


def _other_start(parameter: Template) -> Template:
    """Return the same of an argument in other tags, which may be named after it."""
    start = _tag_start(split_at(parameter, VALUE)[0])
    return (*start, _NAME_START) if _is_element(parameter) else start


def _last_tag(start: Template) -> Template:
    """Return the beginning of a tag without the texts before it, which may be missing."""
    text, *rest = start
    return (str(text)[str(text).rfind("<") :], *rest)


def _value_begin(begin: Template) -> str:
    """Return the tag directly before a value, in dialects with several before it."""
    last = text_of(begin[-1:]).strip().removeprefix('"')
    return last if last.startswith("<") else ""


def _key_end(begin: Template) -> str:
    """Return the tag directly after a key, in dialects that have one."""
    after = text_of(split_at(begin, KEY)[1][:1]).strip()
    return after if after.startswith("</") else ""


def without_mark(tag: str) -> str:
    """Return a tag without the mark before its word, a common mistake of models."""
    return re.sub(r"\A(</?)(?:[^\w\s/]\w+[^\w\s]\s?|\w+:)", r"\1", tag)


def _without_mark(tag: str) -> tuple[str, ...]:
    plain = without_mark(tag)
    return () if plain == tag else (plain,)


def _damaged(tag: str) -> tuple[str, ...]:
    """Return an end that lacks its bracket before a line break, if it is a word."""
    found = re.fullmatch(r"(</\w+)>", tag)
    return (f"{found[1]}\n",) if found else ()


def _other_ends(tag: str) -> tuple[str, ...]:
    """Return the parts of an end made of several tags, any of which may be missing."""
    parts = re.split(r"(?<=>)(?=<)", tag) if tag.startswith("</") else []
    return (*_without_mark(tag), *(parts if len(parts) > 1 else ()))
