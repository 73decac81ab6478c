"""Patterns of schemas, which are regular expressions of ECMA-262, as llguidance reads them."""

import re
from collections.abc import Iterator, Sequence

# Digits and letters are those of ECMA-262, as llguidance reads them in JSON.
_ESCAPED = {
    "/": r"\/",
    "\n": r"\n",
    "\\\n": r"\n",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
_OF_TERMINALS = re.compile(r"\\.|[/\n]", re.DOTALL)
_ESCAPE = r"\\[pPux]\{[^}]*\}|\\0(?![0-9])|\\."
_TOKEN = re.compile(
    rf"{_ESCAPE}|\[\^?\]?(?:\\.|[^\]\\])*\]|\{{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\}}|.", re.DOTALL
)
_NEGATED = "[^"
# Classes inside of classes, and operators on them, are not ECMA-262's; those of POSIX are kept.
_IN_CLASS = re.compile(rf"{_ESCAPE}|\[(?!:[a-z]+:)|&{{2,}}|~{{2,}}|(?<=-)-(?=.)", re.DOTALL)
_NUL = r"\x00"
_LITERAL = {r"\0": _NUL, "{": r"\{"}


class PatternError(ValueError):
    """The pattern cannot be enforced."""


def exact(pattern: str) -> str:
    """Return a pattern for llguidance, in whose negated classes NUL is missing too.

    In JSON, llguidance 1.9 reads a class with all control characters as one with quotes and
    backslashes.
    """
    return "".join(_without_nul(part) for part in _tokens(pattern))


def searched(pattern: str) -> str:
    """Return a pattern for whole texts that contain a match of a pattern, as part of a terminal.

    Raises:
        PatternError: It has anchors elsewhere than at the ends of its alternatives.
    """
    return "|".join(_whole(tokens, pattern) for tokens in _alternatives(_tokens(pattern)))


def _whole(tokens: Sequence[str], pattern: str) -> str:
    starts, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    inner = tokens[starts : len(tokens) - ends]
    if {"^", "$"} & {*inner}:
        raise PatternError(f"the pattern {pattern!r} has anchors inside")
    # Inside of a class too, they end a terminal.
    body = _OF_TERMINALS.sub(lambda found: _ESCAPED.get(found[0], found[0]), "".join(inner))
    before, after = ("" if is_there else "(?s:.*)" for is_there in (starts, ends))
    return f"{before}(?:{body}){after}"


def _alternatives(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Yield the tokens between the bars outside all brackets."""
    depth, found = 0, list[str]()
    for part in tokens:
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            yield found
            found = []
        else:
            found.append(part)
    yield found


def _tokens(pattern: str) -> list[str]:
    """Return a pattern in pieces: classes, escapes, repetitions and characters."""
    return [_translated(part) for part in _TOKEN.findall(pattern)]


def _translated(part: str) -> str:
    if len(part) > 1 and part.startswith("["):
        begin = _NEGATED if part.startswith(_NEGATED) else "["
        return begin + _IN_CLASS.sub(_in_class, part.removeprefix(begin))
    return _LITERAL.get(part, part)


def _in_class(found: re.Match[str]) -> str:
    text = found[0]
    if text.startswith("\\"):
        return _LITERAL.get(text, text)
    return "".join(f"\\{character}" for character in text)


def _without_nul(part: str) -> str:
    if len(part) == 1 or not part.startswith(_NEGATED):
        return part
    others = part.removeprefix(_NEGATED)
    # At its start they would stand for themselves.
    escape = "\\" if others.startswith(("]", "-")) else ""
    return rf"{_NEGATED}{_NUL}{escape}{others}"
