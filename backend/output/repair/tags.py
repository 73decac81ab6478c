"""Finds the tags of a block by their words, even if they are damaged."""

import re
from collections.abc import Collection, Iterator, Sequence

from backend.formats.dialects import Tags
from backend.formats.template import ARGUMENTS, KEY, VALUE, Part, split_at, text_of
from backend.output.repair.names import Names, offered_name


class TagWords:
    """The tags of a dialect, identified by their words."""

    def __init__(self, dialect: Tags) -> None:
        call, call_end = split_at(dialect.call, ARGUMENTS)
        begin, end = split_at(dialect.parameter, VALUE)
        self._is_paired = KEY in begin and any(
            isinstance(part, str) and part.startswith("</") for part in begin
        )
        self._mark = re.escape(dialect.mark) or "(?!)"
        self._call = re.compile(opening(call[0]))
        self._call_end = _closing(call_end)
        self._begin = re.compile(opening(begin[0]))
        self._texts = [text_of((part,)).strip() for part in begin if isinstance(part, str)]
        ends = (text_of(end).strip(), text_of(call_end).strip(), dialect.mark)
        texts = "|".join(map(re.escape, filter(None, ends)))
        self._end = re.compile(rf"(?:{texts}|</[^<>\n]*+>?)\s*+")
        self._value_begin = self._texts[-1 if self._is_paired else 0]
        self._value_end = text_of(end).strip()
        self._verbatim = dialect.verbatim
        tag_end = self._texts[-1].removeprefix('"') if not self._is_paired else ">"
        self._tag_end = rf"(?:/?>|{re.escape(tag_end)})?"
        mark = re.match(r"<([^\w\s]\w+[^\w\s]|\w+:)", str(begin[0]))
        self._mark_in_tag = f"(?:{re.escape(mark[1])})?" if mark else ""
        # The tags of pairs have no attributes.
        begin_tag = "(?!)" if self._is_paired else self._begin.pattern
        self._parameter = (
            rf"""{begin_tag}\s*["']?(?P<key>[^<>"'\n/]+)["']?"""
            rf"""(?:\s+\w+="(?P<kind>\w*)")?\s*{self._tag_end}"""
        )
        head = text_of(call[1:]).strip()
        separator = rf"(?:{re.escape(head)})?" if head.startswith("<") else ""
        self._head_end = re.compile(rf"""["']*(?:\s+\w+="\w*")*\s*{self._tag_end}\s*{separator}""")

    def calls(self, raw: str, names: Names) -> Iterator[tuple[int, int, bool]]:
        """Yield the start and end of each call, and whether it is closed."""
        begins = [
            found.end()
            for found in self._call.finditer(raw)
            if offered_name(_first_label(raw, found.end()), names)
        ]
        ends = [*begins[1:], len(raw)][: len(begins)]
        for begin, limit in zip(begins, ends, strict=True):
            found = self._call_end.search(raw, begin, limit)
            yield begin, found.end() if found else limit, found is not None or limit < len(raw)

    def has_other_text(self, body: str) -> bool:
        """Tell whether a body without arguments contains text."""
        rest = re.sub(r"</?[^<>\n=]*>|" + self._mark, "", self._call_end.sub("", body))
        return bool(rest.strip())

    def has_ended(self, body: str) -> bool:
        """Tell whether the last argument in a body has a value, and that value its end."""
        if self._is_paired:
            key, key_end, value = self._texts
            argument = body.rpartition(key)[2]
            last = argument.partition(key_end if key_end in argument else value)[2]
        else:
            last = body[max(body.rfind(self._value_begin), 0) :]
        return self._value_end in last or "</" in last

    def name_at(self, raw: str, begin: int) -> tuple[str, int]:
        """Return the name in the call that begins at a position, and the end of its head."""
        name = _first_label(raw, begin)
        end = raw.index(name, begin) + len(name)
        head = self._head_end.match(raw, end)
        return name, head.end() if head else end

    def arguments(
        self, body: str, keys: Collection[str] = ()
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield keys, each with its raw value and the type stated in its tag.

        Args:
            body: The text between the head of a call and its end.
            keys: The declared arguments, whose tags may be named after them.
        """
        if self._is_paired:
            yield from self._pairs(body)
        yield from self._parameters(body, keys)

    def _parameters(
        self, body: str, keys: Collection[str]
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        closed = [key for key in keys if f"{key}>" in body]
        tag = re.compile(f"{self._parameter}|{self._own_tag(closed)}")
        found = list(tag.finditer(body))
        limits = [*(match.start() for match in found[1:]), len(body)][: len(found)]
        for match, limit in zip(found, limits, strict=True):
            value = body[match.end() : limit]
            key = match["own"] or match["key"].strip()
            yield key, (self._cleaned(value), match["kind"] or "")

    def _own_tag(self, keys: Collection[str]) -> str:
        """Return a pattern for a tag named after an argument, first or after another's end."""
        names = "|".join(map(re.escape, sorted(keys, key=len, reverse=True))) or "(?!)"
        mark = self._mark_in_tag
        ends = rf"\A|{re.escape(self._value_end or '</')}|</{mark}(?:{names})>"
        return rf"(?:{ends})\s*(?:{self._mark})?<{mark}(?P<own>{names})>"

    def _cleaned(self, value: str) -> str:
        """Return a raw value without marks, trailing closing tags and surrounding newlines."""
        begin = end = len(value)
        for found in self._end.finditer(value):
            begin = begin if found.start() == end else found.start()
            end = found.end()
        if begin < end == len(value):
            value = value[:begin].rstrip()
        before, after = self._verbatim
        if before and value.startswith(before) and value.endswith(after):
            return value.removeprefix(before).removesuffix(after)
        return value.removeprefix("\n").removesuffix("\n")

    def _pairs(self, body: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield pairs, each of which may lack one of its four tags."""
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


_LONE_NAME = r"""(?=["']?[^\s<>="']+["']?\s*/?>)"""
_ATTRIBUTE_TAG = re.compile(r"(?P<begin>.*?[^\s=])(?:\s+(?P<attribute>\w+))?=\"?", re.DOTALL)


def opening(text: Part) -> str:
    """Return a regular expression for an opening tag up to a name, damaged or not.

    The name may be an attribute, in quotes or not, follow an equals sign, or just a space:
    `<function=f`, `<function name="f"`, `<function f`.
    """
    words = str(text).strip()
    found = _ATTRIBUTE_TAG.fullmatch(words)
    if found is None:
        return re.escape(words).replace(r"\ ", r"\s+")
    begin = re.escape(found["begin"]).replace(r"\ ", r"\s+")
    names = "|".join(dict.fromkeys(filter(None, (found["attribute"], "name"))))
    return rf"{begin}(?:(?:\s+(?:{names}))?\s*=\s*|\s+{_LONE_NAME})[\"']?"


def _closing(end: Sequence[Part]) -> re.Pattern[str]:
    return re.compile(re.escape(text_of(tuple(end)).strip()))


def _first_label(raw: str, position: int) -> str:
    found = re.compile(r"""[\s"']*([^\s<>"'/]+)""").match(raw, position)
    return found[1] if found else ""
