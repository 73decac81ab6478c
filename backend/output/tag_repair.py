"""The markup of a format in a damaged text, and the names of offered tools in it."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from backend.formats.closing import TagEnds
from backend.formats.dialects import (
    ARGUMENTS,
    KEY,
    NAME,
    TYPE,
    VALUE,
    Characters,
    Dialect,
    Id,
    Markup,
    Messages,
    NamedJson,
    Objects,
    Part,
    Reading,
    Tags,
    Template,
    split_at,
    text_of,
)
from backend.formats.format import ToolFormat
from backend.output.readers.patterns import ATTRIBUTES, attributes_in, span_end
from backend.output.readers.reader import NAMESPACES, SYNTAX, Names, offered_name

_LABEL = re.compile(r"\w[\w:.-]*")


def last_name(text: str, names: Names) -> str:
    """Return the last offered name in a text."""
    words = reversed(_LABEL.findall(text))
    return next(filter(None, (offered_name(word, names) for word in words)), "")


class TagWords:
    """The tags of a dialect, identified by their words.

    Attributes:
        call_begin: The text that begins every call.
    """

    def __init__(self, dialect: Tags) -> None:
        call, call_end = split_at(dialect.call, ARGUMENTS)
        begin, end = split_at(dialect.parameter, VALUE)
        self._is_paired = KEY in begin and any(
            isinstance(part, str) and part.startswith("</") for part in begin
        )
        self._mark = re.escape(dialect.mark) or "(?!)"
        self.call_begin = text_of(call[:1]).strip()
        self._call = re.compile(_opening(call[0]))
        self._call_end = _closing(call_end)
        self._other_call_end = _any_of(dialect.other_call_ends)
        self._begin = re.compile(_opening(begin[0]))
        self._texts = [text_of((part,)).strip() for part in begin if isinstance(part, str)]
        known = TagEnds.of(Reading(dialect), dialect)
        self._value_ends, self._call_ends = (
            [_BLANK.sub("", each) for each in ends] for ends in (known.ends, known.call_ends)
        )
        ends = (text_of(end).strip(), text_of(call_end).strip())
        texts = "|".join(map(re.escape, filter(None, ends)))
        self._end = re.compile(rf"(?:{texts}|(?:{self._mark})?</[^<>\n]*+>?|{self._mark})\s*+")
        tags = "|".join(map(re.escape, (*self._texts, text_of(call_end).strip())))
        self._escaped_line = re.compile(rf"\\n(?={tags})")
        self._value_begin = self._texts[-1 if self._is_paired else 0]
        self._value_end = text_of(end).strip()
        self._verbatim = dialect.verbatim
        type_tag = "[^<]*+".join(
            re.escape(text_of(each)) for each in split_at(dialect.type_tag or (TYPE,), TYPE)
        )
        type_tag = rf"(?<={re.escape(known.key_end)})\s*+{type_tag}"
        self._type_tag = re.compile(type_tag if dialect.type_tag else "(?!)")
        self._pads_values = dialect.pads_values
        tag_end = self._texts[-1].removeprefix('"') if not self._is_paired else ">"
        self._tag_end = rf"(?:/?>|{re.escape(tag_end)})?"
        mark = re.match(r"<([^\w\s]\w+[^\w\s]|\w+:)", str(begin[0]))
        self._mark_in_tag = f"(?:{re.escape(mark[1])})?" if mark else ""
        # The tags of pairs have no attributes.
        begin_tag = "(?!)" if self._is_paired else self._begin.pattern
        if mark:
            # A tag of a declared argument may lack it.
            escaped = re.escape(mark[1])
            begin_tag = begin_tag.replace(escaped, f"(?P<mark>{escaped})?", 1)
        self._parameter = (
            rf"""{begin_tag}\s*["']?(?P<key>[^<>"'\n/]+)["']?"""
            rf"""(?:\s+\w+="(?P<kind>\w*)")?\s*{self._tag_end}"""
        )
        head = text_of(call[1:]).strip()
        separator = rf"(?:{re.escape(head)})?" if head.startswith("<") else ""
        self._head_end = re.compile(rf"""["']*(?:\s+\w+="\w*")*\s*{self._tag_end}\s*{separator}""")

    def calls(self, raw: str, names: Names) -> Iterator[tuple[int, int, int, bool]]:
        """Yield start, place of the name and end of each call, and whether it is closed."""
        begins: list[re.Match[str]] = []
        for found in self._call.finditer(raw):
            is_inner = bool(begins) and self._is_in_value(raw[begins[-1].end() : found.start()])
            if not is_inner and _first_label(raw, found.end()):
                begins.append(found)
        limits = [*(found.start() for found in begins[1:]), len(raw)][: len(begins)]
        for begin, limit in zip(begins, limits, strict=True):
            if not offered_name(_first_label(raw, begin.end()), names):
                continue
            end = self._end_of_call(raw, begin.end(), limit)
            is_closed = end is not None or limit < len(raw)
            yield begin.start(), begin.end(), end or limit, is_closed

    def odd_calls(self, raw: str, names: Names) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the same of calls whose names are tags, stand in other tags, or alone."""
        position = last_end = 0
        while found := _ODD_CALL.search(raw, position):
            position = found.end()
            is_set_off = _TAGS.fullmatch(raw, last_end, found.start())
            if not (is_set_off and offered_name(found["name"], names)):
                continue
            end = position if found["closed"] else _own_end(found)
            end = end or self._end_of_call(raw, position, len(raw))
            yield found.start(), found.start("name"), end or len(raw), end is not None
            if end is None:
                return
            position = last_end = end

    def _end_of_call(self, raw: str, begin: int, limit: int) -> int | None:
        ends = (self._call_end, self._other_call_end)
        found = next(filter(None, (each.search(raw, begin, limit) for each in ends)), None)
        return found.end() if found else None

    def with_lines(self, raw: str) -> str:
        """Return a text of the same length, with line breaks for their escapes before tags."""
        return self._escaped_line.sub(" \n", raw) if self._is_paired else raw

    def _is_in_value(self, body: str) -> bool:
        """Tell whether an argument begins at the end of a text, or no tag has ended it."""
        begin = body.rfind(self._value_begin)
        return begin >= 0 and not self._end.search(body, begin)

    def attributes(self, raw: str, begin: int, end: int, keys: Collection[str]) -> dict[str, str]:
        """Return arguments beside the name, `f a="x" n=2`, if these are all, and all declared."""
        name_end = raw.index(name := _first_label(raw, begin), begin) + len(name)
        beside_end = span_end(_ATTRIBUTES, raw[:end], name_end)
        pairs = attributes_in(raw[name_end:beside_end])
        rest = re.sub(r"\A\s*/?>", "", raw[beside_end:end])
        is_all = pairs.keys() <= {*keys} and not self.has_other_text(rest)
        return pairs if is_all else {}

    @staticmethod
    def unwrapped_from(body: str) -> int:
        """Return where the arguments begin in a body: after a tag around them all."""
        found = _AROUND_ARGUMENTS.match(body)
        return found.end() if found else 0

    def has_other_text(self, body: str) -> bool:
        """Tell whether a body without arguments contains text."""
        rest = re.sub(r"</?[^<>\n=]*>|" + self._mark, "", self._call_end.sub("", body))
        return bool(rest.strip())

    def has_ended(self, body: str) -> bool:
        """Tell whether the last argument in a body has a value, and a tag after that."""
        if self._is_paired:
            key, key_end, value = self._texts
            argument = body.rpartition(key)[2]
            last = argument.partition(key_end if key_end in argument else value)[2]
        else:
            last = body[max(body.rfind(self._value_begin), 0) :]
        return self._value_end in last or "</" in last or self._call_end.search(last) is not None

    def name_at(self, raw: str, begin: int) -> tuple[str, int]:
        """Return the name in the call that begins at a position, and the end of its head."""
        name = _first_label(raw, begin)
        end = raw.index(name, begin) + len(name)
        head = self._head_end.match(raw, end)
        return name, head.end() if head else end

    def arguments(
        self, body: str, keys: Collection[str] = (), *, is_own: bool = True
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield keys, with raw value and type; a tag may be named after one of `keys`.

        Args:
            is_own: Whether the call begins as the dialect writes it.
        """
        if self._is_paired:
            yield from self._pairs(body)
        yield from self._parameters(body, keys, is_own=is_own)

    def _parameters(
        self, body: str, keys: Collection[str], *, is_own: bool
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        closed = [key for key in keys if key and f"{key}>" in body]
        tag = re.compile(f"{self._parameter}|{self._own_tag(closed)}")
        found = [each for each in tag.finditer(body) if self._is_argument(each, keys)]
        # The tag that ends a value stays with it.
        places = (max(match.start(), match.start("gap")) for match in found[1:])
        limits = [*places, len(body)][: len(found)]
        for match, limit in zip(found, limits, strict=True):
            value = body[match.end() : limit]
            key = match["own"] or match["key"].strip()
            is_exact = is_own and match[0].startswith(self._texts[0])
            yield key, (self._cleaned(value, key, is_own=is_exact), match["kind"] or "")

    def _is_argument(self, tag: re.Match[str], keys: Collection[str]) -> bool:
        """Tell whether a tag has the mark of its dialect, or names a declared argument."""
        is_marked = "mark" not in tag.re.groupindex or tag["mark"] or tag["own"]
        return bool(is_marked) or tag["key"].strip() in keys

    def _own_tag(self, keys: Collection[str]) -> str:
        """Return a pattern for a tag named after an argument, first or after another's end."""
        names = "|".join(map(re.escape, sorted(keys, key=len, reverse=True))) or "(?!)"
        mark = self._mark_in_tag
        ends = rf"\A|{re.escape(self._value_end or '</')}|</{mark}(?:{names})>"
        return rf"(?:{ends})(?P<gap>\s*)(?:{self._mark})?<{mark}(?P<own>{names})>"

    def _cleaned(self, value: str, key: str = "", *, is_own: bool = True) -> str:
        """Return a raw value without the tags after it, and newlines that belong to tags.

        They may belong to any tags that are not the dialect's own.
        """
        end, is_closed = self._end_of_value(value, key)
        value = value[:end]
        before, after = self._verbatim
        if before and value.lstrip().startswith(before):
            return value.lstrip().removeprefix(before).rstrip().removesuffix(after)
        line = "\r\n" if value.startswith("\r\n") else "\n"
        is_padded = (self._pads_values or not is_own) and value.startswith(line)
        value = value.removeprefix(line) if is_padded else value
        return value if is_closed and not is_padded else value.removesuffix(line)

    def _end_of_value(self, value: str, key: str) -> tuple[int, bool]:
        """Return where the tags after a value begin, and whether one of them ends it.

        A tag that nothing in the value opens, and that stands for its end or has the name of its
        key, does too.
        """
        end, is_closed, is_ended = len(value), False, False
        opened = Counter(_OPENED.findall(value))
        for found in reversed(self._trailing_ends(value)):
            tag = _BLANK.sub("", found[0])
            name = tag.removeprefix("</").rstrip(">")
            # The reply may end within it.
            is_end = any(each.startswith(tag) for each in self._value_ends)
            is_end = is_end or re.match(self._mark, tag) is not None
            is_last = not is_ended and any(each.startswith(tag) for each in self._call_ends)
            is_named = bool(key) and re.fullmatch(self._mark_in_tag + re.escape(key), name)
            is_spare = opened[name] < opened[f"/{name}"] and (is_named or not is_closed)
            if not (is_end or is_last or is_spare):
                break
            end = found.start()
            is_ended |= is_end
            is_closed = is_ended or not is_last
        return end, is_closed

    def _trailing_ends(self, value: str) -> list[re.Match[str]]:
        """Return the closing tags at the end of a text."""
        ends: list[re.Match[str]] = []
        for found in self._end.finditer(value):
            if ends and ends[-1].end() < found.start():
                ends.clear()
            ends.append(found)
        return ends if ends and ends[-1].end() == len(value) else []

    def _pairs(self, body: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield pairs, each of which may lack one of its four tags; for both inner ones `k=v`."""
        key, _, value = self._texts
        tags = "|".join(map(re.escape, (*self._texts, self._value_end)))
        first, *pieces = re.split(f"({tags})", self._type_tag.sub("", body))
        name = first.strip()
        for before, text, after in zip(
            pieces[::2], pieces[1::2], [*pieces[2::2], ""], strict=False
        ):
            is_closed = after == self._value_end
            if before == key or (before == self._value_end and not name):
                name = text.strip() or name
                if before == key and is_closed and "=" in name:
                    name, _, text = name.partition("=")
                    yield name.strip(), (text.strip(), "")
                    name = ""
            elif name and (text.strip() or (before == value and is_closed)):
                text = text if before == value else text.lstrip()
                yield name, (text if is_closed else self._cleaned(text), "")
                name = ""


_BLANK = re.compile(r"\s")
_AROUND_ARGUMENTS = re.compile(r"\s*(?:</\w+>\s*)?<(?:arguments|parameters|args|params|input)>")
_OPENED = re.compile(r"<(/?[^\s<>/]+)")
_ATTRIBUTES = re.compile(ATTRIBUTES.ungrouped)
_LONE_NAME = r"""(?=["']?[^\s<>="']+["']?\s*/?>)"""
_ATTRIBUTE_TAG = re.compile(r"(?P<begin>.*?[^\s=])(?:\s+(?P<attribute>\w+))?=\"?", re.DOTALL)


def _opening(text: Part) -> str:
    """Return a regular expression for an opening tag up to a name, damaged or not.

    The name may be an attribute, in quotes or not, follow an equals sign, or just a space:
    `<function=f`, `<function name="f"`, `<function f`.
    """
    words = str(text).strip()
    found = _ATTRIBUTE_TAG.fullmatch(words)
    if found is None:
        return re.escape(words).replace(r"\ ", r"\s+")
    begin = re.escape(found["begin"]).replace(r"\ ", r"\s+")
    begin = re.sub("^<", r"<\\s*", begin)
    names = "|".join(dict.fromkeys(filter(None, (found["attribute"], "name"))))
    return rf"{begin}(?:(?:\s*(?:{names}))?\s*=\s*|\s+{_LONE_NAME})[\"']?"


def _closing(end: Sequence[Part]) -> re.Pattern[str]:
    return re.compile(re.escape(text_of(tuple(end)).strip()))


def _first_label(raw: str, position: int) -> str:
    found = re.compile(r"""[\s"']*([^\s<>"'/]+)""").match(raw, position)
    return found[1] if found else ""


# Tags that models give to names.
_NAME_TAGS = "(?:function|tool|tool_name|function_name|name|call|invoke)"
_MARKED = r"(?:[^\w\s<>/]\w+[^\w\s<>]\s?|\w+:)?"
_TAGS = re.compile(r"\s*+(?:<[^<>]*+>\s*+)*+")
# A name that is a tag, stands in other tags, or alone before the tags of arguments.
_ODD_CALL = re.compile(
    rf"""(?:<\s*+{_MARKED}(?:(?P<tag>{_NAME_TAGS})[\s=:"'>]+)?|(?<=[>\n]))"""
    rf"""(?P<name>[^\s<>="'/{{(]+)(?:["']?[^<>\n]*?(?P<closed>/?)>|(?=\s*<))"""
    rf"""(?P<again>\s*</{_NAME_TAGS}>)?"""
)


def _own_end(call: re.Match[str]) -> int | None:
    """Return the end of the tag that ends such a call by its name, or that of its tag."""
    tags = (call["name"], *((call["tag"],) if call["tag"] and not call["again"] else ()))
    end = re.compile(rf"</{_MARKED}(?:{'|'.join(map(re.escape, tags))})\s*>")
    found = end.search(call.string, call.end())
    return found.end() if found else None


_PUNCTUATION = r"\s}\])>,;`"
_MARK = re.compile(r"<[^<>]+>")
_WORD = re.compile(r"[^\W\d][\w./:-]*")


@dataclass(frozen=True, slots=True)
class _FormatMarkup:
    """All markup of a format.

    Attributes:
        texts: The markers, without tags that contain names.
        strays: Markers and tags that do not begin anything.
        heads: The beginnings of its tags up to a name.
        syntax: Words of the format between an opener and the name of a tool.
        words_before_name: Number of other words there, such as ids.
    """

    pattern: re.Pattern[str]
    texts: tuple[str, ...]
    strays: tuple[str, ...]
    heads: tuple[str, ...]
    syntax: frozenset[str]
    words_before_name: int

    @property
    def _markers(self) -> re.Pattern[str]:
        return _any_of(self.texts)

    def removed(self, text: str) -> str:
        return self.pattern.sub(" ", text)

    def begins_call(self, text: str) -> bool:
        """Tell whether a text begins with an object, or with a marker that begins something."""
        found = self.pattern.match(text)
        return text.startswith("{") or (found is not None and found[0] not in self.strays)

    def begins_with_call(self, text: str) -> bool:
        """Tell whether a text begins with a whole head of a call: an object, a tag or a bracket."""
        if found := self.pattern.match(text):
            return found[0] not in self.strays and found[0].startswith("<")
        return _OTHER_CALL.match(text) is not None

    def may_begin_with_call(self, text: str) -> bool:
        """Tell whether more text decides that."""
        is_head = any(head.startswith(text) for head in self.heads)
        return bool(text) and (is_head or _BEGUN_OTHER_CALL.fullmatch(text) is not None)

    def has_words(self, text: str, names: Names) -> bool:
        """Tell whether a text contains more than markup and the words before a name."""
        syntax = self.syntax | NAMESPACES
        words = (re.split("[.:]+", word.rstrip(":.")) for word in _WORD.findall(self.removed(text)))
        others = sum(not syntax.issuperset(parts) for parts in words) > self.words_before_name
        return others or any(offered_name(word, names) for word in _WORD.findall(text))

    def without_strays(self, text: str) -> str:
        """Remove leading punctuation and markers from text that follows a call."""
        found = re.match(rf"(?:[{_PUNCTUATION}]*+(?:{_any_of(self.strays).pattern}))*", text)
        return text[found.end() :] if found else text

    def may_begin_stray(self, text: str) -> bool:
        """Tell whether text that follows a call may still become such a marker."""
        rest = re.sub(rf"\A[{_PUNCTUATION}]+", "", self.without_strays(text))
        return any(stray.startswith(rest) for stray in self.strays)

    def settled(self, text: str) -> str:
        """Return a text without an end that may become a marker, unless it ends a whole one."""
        whole = [found.span() for found in self._markers.finditer(text)]
        for begin in range(max(0, len(text) - max(map(len, self.texts), default=0)), len(text)):
            is_end = any(first < begin < end for first, end in whole)
            if not is_end and text[begin:] in _prefixes(self.texts):
                return text[:begin]
        return text

    def first_word(self, text: str) -> tuple[str, bool]:
        """Return the word that may be the tool's name, and whether it is complete."""
        plain = self._markers.sub(" ", self.settled(text))
        words = (found for found in _WORD.finditer(plain) if self._is_free(found[0]))
        found = next(islice(words, self.words_before_name, None), None)
        if found is None:
            return "", False
        return found[0].rstrip(":./"), found.end() < len(plain)

    def _is_free(self, word: str) -> bool:
        return word.rstrip(":.") not in self.syntax


@cache
def _prefixes(texts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(text[:end] for text in texts for end in range(1, len(text) + 1))


@cache
def markup_of(tool_format: ToolFormat) -> _FormatMarkup:
    """Return the markup of a format."""
    readings = tool_format.readings
    texts = {*tool_format.openers, *tool_format.closers, *tool_format.tokens}
    tags = {tag for reading in readings for tag in _tags(reading)}
    begun = (head for reading in readings for head in _heads(reading))
    markers = sorted(filter(None, (text.strip() for text in texts)), key=len, reverse=True)
    patterns = [*sorted(tags, key=len, reverse=True), *map(re.escape, markers)]
    pattern = re.compile("|".join([*patterns, "(?!)"]))
    heads = [part for reading in readings for part in _head(reading)]
    words = {word for part in heads if isinstance(part, str) for word in _WORD.findall(part)}
    before = sum(isinstance(part, Id | Characters) for part in heads)
    openers = {opener.strip() for opener in tool_format.openers}
    ends = {text for text in markers if text not in openers}
    ends |= {re.sub(r"\\(.)", r"\1", tag) for tag in tags if tag.startswith("</")}
    whole = {mark for reading in readings for mark in call_ends(reading.dialect)}
    # The beginning of a longer mark is none.
    ends = whole | {end for end in ends if not any(mark.startswith(end) for mark in whole)}
    strays = sorted(ends, key=len, reverse=True)
    return _FormatMarkup(
        pattern, tuple(markers), tuple(strays), tuple(begun), SYNTAX | words, before
    )


def call_ends(dialect: Dialect) -> Iterator[str]:
    """Yield the marks after the arguments of a named call, each on its own."""
    for template in dialect.calls if isinstance(dialect, NamedJson) else ():
        for part in split_at(template, ARGUMENTS)[1]:
            yield from _MARK.findall(part) if isinstance(part, str) else ()


def _head(reading: Reading) -> Template:
    """Return the parts of a call before the tool's name, in dialects with words there."""
    call = reading.dialect.call if isinstance(reading.dialect, NamedJson | Tags) else ()
    return call[: call.index(NAME)] if NAME in call else ()


@cache
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, texts), "(?!)"]))


def _tags(reading: Reading) -> Iterator[str]:
    """Yield regular expressions for the tags of a dialect."""
    dialect = reading.dialect
    match dialect:
        case Tags():
            for template in (dialect.call, dialect.parameter):
                yield from _closing_tags(template)
                if not str(template[0]).endswith(">"):
                    yield rf"{_opening(template[0])}[^<>\n]*>?"
            yield from (re.escape(mark) for mark in (*dialect.verbatim, dialect.mark) if mark)
        case NamedJson():
            for template in dialect.calls:
                yield from _closing_tags(template)
        case Messages(calls=calls) if calls:
            yield from _tags(calls)
        case Objects() | Markup():
            yield "```(?:json)?"


def _heads(reading: Reading) -> Iterator[str]:
    """Yield the beginnings of the tags of a dialect that contain names."""
    dialect = reading.dialect
    for template in (dialect.call, dialect.parameter) if isinstance(dialect, Tags) else ():
        yield str(template[0])


def _closing_tags(template: Template) -> Iterator[str]:
    for part in template:
        text = part.strip() if isinstance(part, str) else ""
        if text.startswith("</") or (text.startswith("<|") and text.endswith("|>")):
            yield re.escape(text)


_OTHER_CALL = re.compile(
    r"""\{\s*["'](?:(?:name|tool_name|function|type|id|tool_call_id)["']\s*:|"""
    r"""(?!arg|param|input)[\w.-]+["']\s*:\s*\{)|[\w.-]+\("""
)
_BEGUN_OTHER_CALL = re.compile(
    r"""\{\s*(?:["'][\w.-]{0,64}(?:["']\s*(?::\s*)?)?)?|[\w.-]{1,64}|<[^<>\n]{0,200}"""
)
# Characters that may end the tag, the string or the brackets around a name.
_ENDS = r"""[>"'|)\],]*+"""
_FENCE = r"""\s*+```(?:json)?\s*+["{]"""
_FENCE_BEGUN = r"\s*+`{1,3}(?:j|js|jso|json)?\s*+"
_CALL = re.compile(
    rf"""{_ENDS}(?:[(\[{{<:=]|/>|\s*+["<{{]|{_FENCE}"""
    r"""|\s++(?:[\[(]\S|>\s*+["<{]|\w++(?:=|</)))"""
)
_BEFORE_CALL = re.compile(rf"{_ENDS}(?:/|\s*+|{_FENCE_BEGUN}|\s++(?:[\[(]|>\s*+|\w++<?))")
_SENTENCE = re.compile(rf"{_ENDS}[ \t]++[^\W\d_]++[\s,.;!?]")
_BEFORE_SENTENCE = re.compile(rf"{_ENDS}(?:[ \t]++[^\W\d_]*+)?")


def goes_on_as_call(markup: _FormatMarkup, raw: str, opener: str, *, in_prose: bool) -> bool | None:
    """Tell whether text goes on like a call after its first word; `None` if more text decides.

    Args:
        raw: The text from the opener on.
        in_prose: Whether the opener stands within a line of text. Then structure must follow;
            elsewhere it suffices that no sentence does.
    """
    word, _ = markup.first_word(raw)
    begin = raw.find(word, len(opener))
    after = raw[begin + len(word) :]
    if in_prose:
        head = raw[len(opener) : begin].rstrip()
        if head and markup.words_before_name and not head.endswith(">"):
            # A marker follows other words of a call.
            return False
        if "{" in raw[len(opener) : begin] or _CALL.match(after):
            return True
        return None if _BEFORE_CALL.fullmatch(after) else False
    if _SENTENCE.match(after):
        return False
    return None if _BEFORE_SENTENCE.fullmatch(after) else True
