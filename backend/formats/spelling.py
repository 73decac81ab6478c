"""Writes earlier calls as their family does, for templates that show tools but no calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from backend.formats.dialects import (
    ARGUMENTS,
    NAME,
    QUOTED_NAME,
    Literals,
    Maybe,
    Objects,
    split_at,
    text_of,
)
from backend.formats.format import Frame
from backend.formats.objects import HERMES_CLOSER, HERMES_OPENER
from backend.formats.thoughts import THINK

PARAGRAPH = "\n\n"
_json = partial(json.dumps, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written: as a family writes them, or as plain objects if that is not known.

    Attributes:
        begin: The text before the first call.
        call: The texts before the name of a call, between name and arguments, and after these.
        separator: The text between two calls.
        end: The text after the last call.
        after_content: The text between content and calls.
        has_literals: Whether arguments are `key=value` in Python; otherwise they are an object.
    """

    begin: str = ""
    call: tuple[str, str, str] = ('{"name": "', '", "arguments": ', "}")
    separator: str = "\n"
    end: str = ""
    after_content: str = PARAGRAPH
    has_literals: bool = False

    def written(self, functions: Sequence[Mapping[str, object]]) -> str:
        """Return the text of at least one call, without marks inside its name and arguments.

        Args:
            functions: The name and arguments of each; arguments that are no object are a text.
        """
        try:
            return _written(self if all(map(self._can_write, functions)) else PLAIN, functions)
        except RecursionError:
            # The encoder of JSON follows nested values further.
            return _written(PLAIN, functions)

    def _can_write(self, function: Mapping[str, object]) -> bool:
        arguments = function["arguments"]
        if not isinstance(arguments, Mapping):
            return self is PLAIN
        return not self.has_literals or all(map(str.isidentifier, arguments))


PLAIN = Spelling()


def _written(spelling: Spelling, functions: Sequence[Mapping[str, object]]) -> str:
    calls = (_call(spelling, function) for function in functions)
    return f"{spelling.begin}{spelling.separator.join(calls)}{spelling.end}"


def _call(spelling: Spelling, function: Mapping[str, object]) -> str:
    before, between, after = spelling.call
    arguments = function["arguments"]
    if spelling.has_literals and isinstance(arguments, Mapping):
        pairs = (f"{key}={_literal(value)}" for key, value in arguments.items())
        text = ", ".join(pairs)
    else:
        text = _json(arguments)
    name = _json(function["name"])[1:-1]
    return f"{before}{escape_marks(name)}{between}{escape_marks(text)}{after}"


def spelling_in(frame: Frame) -> Spelling | None:
    """Return how a frame's calls are written: as objects, or with literals of Python."""
    dialect, call = frame.dialect, frame.call or frame.dialect.call
    name = QUOTED_NAME if QUOTED_NAME in call else NAME
    if name not in call or ARGUMENTS not in call:
        return None
    before, rest = split_at(call, name)
    between, after = split_at(rest, ARGUMENTS)
    is_fixed = all(
        isinstance(part, str | Maybe) for part in (*frame.begin, *before, *between, *after)
    )
    is_python = isinstance(dialect, Literals) and str(True) in dialect.constants["true"]
    if not is_fixed or not (is_python or isinstance(dialect, Objects)):
        return None
    quote = '"' if name is QUOTED_NAME else ""
    return Spelling(
        begin=text_of(frame.first_call[: -len(call)]),
        call=(f"{text_of(before)}{quote}", f"{quote}{text_of(between)}", text_of(after)),
        separator=text_of(frame.separator),
        end=frame.end,
        after_content="\n",
        has_literals=is_python,
    )


def _literal(value: object) -> str:
    """Return a value in Python; its strings have escapes that JSON has too."""
    match value:
        case None | bool():
            return str(value)
        case Mapping():
            pairs = (f"{_json(key)}: {_literal(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case _:
            return _json(value)


def escape_marks(text: str) -> str:
    """Return JSON of the same value, of which templates and readers of calls drop no part.

    Many a template drops all of a reply before the last end of a thought.
    """
    for mark in (THINK.end, HERMES_OPENER, HERMES_CLOSER):
        text = text.replace(mark, f"\\u{ord(mark[0]):04x}{mark[1:]}")
    return text
