"""A JSON schema's conditions on strings, as terminals that must all match."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from backend.sampling.grammar.writer import escaped

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+W|[0-9]+[YMD]|([0-9]+D)?T[0-9]+[HMS])",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": rf"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|::({_HEX}{{1,4}}:){{0,5}}{_HEX}{{1,4}}|::",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:\x2f?#\[\]@!$&'()*+,;=%-]+",
}
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class PatternError(ValueError):
    """The pattern cannot be enforced."""


def string_terminals(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the terminals that a string must match.

    Raises:
        PatternError: llguidance does not support the pattern.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.){{{least},{most}}}/"
    if schema.get("format") in _FORMATS:
        yield f"/{_FORMATS[schema['format']]}/"
    if "pattern" in schema:
        yield f"/{_searched(schema['pattern'])}/"


@cache
def without_tags(tags: tuple[str, ...]) -> str:
    """Return a pattern of text without these tags, each of which starts with its only "<"."""
    begun, left = _prefixes(tags), []
    for prefix in begun:
        following = {tag[len(prefix)] for tag in tags if tag.startswith(prefix)}
        left.append(f"{escaped(prefix)}[^<{''.join(map(escaped, sorted(following)))}]")
    some = f"(?:{'|'.join(map(escaped, begun))})*"
    return f"^(?:[^<]|{some}(?:{'|'.join(left)}))*{some}$"


def _prefixes(tags: tuple[str, ...]) -> list[str]:
    """Return the possible beginnings of these tags, without any complete tag."""
    prefixes = {tag[:length] for tag in tags for length in range(1, len(tag))}
    return sorted(prefix for prefix in prefixes if not prefix.startswith(tags))


def _searched(pattern: str) -> str:
    """Return a pattern for whole texts that contain a match of a pattern."""
    tokens = _TOKEN.findall(pattern)
    starts, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    inner = tokens[starts : len(tokens) - ends]
    if {"^", "$"} & {*inner} or ((starts or ends) and _has_choice(inner)):
        raise PatternError(f"the pattern {pattern!r} has anchors inside")
    body = "".join({"/": r"\/", "\n": r"\n"}.get(token, token) for token in inner)
    before, after = ("" if is_there else "(?s:.*)" for is_there in (starts, ends))
    return f"{before}(?:{body}){after}"


def _has_choice(tokens: list[str]) -> bool:
    """Return whether there are alternatives outside all brackets."""
    depth = 0
    for part in tokens:
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            return True
    return False
