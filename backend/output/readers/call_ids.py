"""The ids of calls, and the names of tools in them."""

import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TypeAlias

from backend.formats.dialects import NamedJson
from backend.formats.format import ToolFormat
from backend.formats.template import INDEX, NAME, Id, Part, Slot, Template

MakeId: TypeAlias = Callable[[str, int], str]

_ALPHANUMERIC = string.ascii_letters + string.digits
_LABEL = r"(?:functions?|tools?|calls?|tool_?calls?|chatcmpl-tool|toolu|fc|id)"
# `functions.`, `functions_`, `functions`, `call_`, a namespace, or nothing.
_BEFORE_NAME = re.compile(rf"(?:{_LABEL}[.:_/#-]*|[\w-]+[.:/])*", re.IGNORECASE)
# A number, or characters that are too random for a part of another name.
_AFTER_NAME = re.compile(
    r"[.:_/#-]*\d*|[.:/#](?=[a-z]*\d)[0-9a-z]+|[_-](?=[a-f]*\d)[0-9a-f]{6,}", re.IGNORECASE
)
_NAMELESS = re.compile(rf"{_LABEL}[.:_/#-]*[0-9a-z-]*|[.:_/#-]*\d*", re.IGNORECASE)


def new_call_id(chars: int = 0) -> str:
    """Return a random id, with `chars` letters and digits if not zero."""
    if chars:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(chars))
    return f"call_{secrets.token_hex(12)}"


class CallIds:
    """The ids of a conversation's calls: none comes twice."""

    def __init__(self, make: MakeId | None = None, used: Collection[str] = ()) -> None:
        """Begin a reply.

        Args:
            make: Makes an id from the name of a tool and a number; random ids by default.
            used: The ids of all earlier calls of the conversation.
        """
        self._make = make or (lambda _name, _number: new_call_id())
        self._known = set(used)
        self._number = len(used)

    def take(self, name: str, written: str = "") -> str:
        """Return the id of the next call: the written one, unless it is empty or known."""
        if not self.accepts(written):
            written = self._new(name)
        self._number += 1
        self._known.add(written)
        return written

    def accepts(self, written: str) -> bool:
        """Tell whether a call may have this id."""
        return bool(written) and written not in self._known

    def note(self, written: str) -> None:
        """Count an id as used."""
        self._known.add(written)

    def _new(self, name: str) -> str:
        number = self._number
        while (made := self._make(name, number)) in self._known:
            number += 1
        return made


def ids_of(tool_format: ToolFormat, used: Collection[str] = ()) -> CallIds:
    """Return the ids of calls in a format, after those of the conversation so far."""
    template = _template(tool_format)
    if template is not None:
        return CallIds(partial(_filled, template), used)
    return CallIds(lambda _name, _number: new_call_id(tool_format.id_chars), used)


def _template(tool_format: ToolFormat) -> Template | None:
    """Return the template of ids in a format whose ids contain the name of the tool."""
    calls = (reading.dialect for reading in tool_format.readings)
    parts = (part for dialect in calls if isinstance(dialect, NamedJson) for part in dialect.call)
    ids = (part.template for part in parts if isinstance(part, Id) and NAME in part.template)
    return next(ids, None)


def _filled(template: Template, name: str, number: int) -> str:
    texts = (_text(part, name, number) for part in template)
    return "".join(texts)


def _text(part: Part, name: str, number: int) -> str:
    if isinstance(part, str):
        return part
    return {NAME: name, INDEX: str(number)}.get(part, "") if isinstance(part, Slot) else ""


def name_in_id(call_id: str, names: Iterable[str]) -> str:
    """Return the offered name in an id, however it is joined with the rest; empty if there is none.

    Of several, the longest one wins; after a name that ends in a digit, other digits are its
    number only behind a separator.
    """
    found = [
        (is_glued, -len(name), name)
        for name in names
        if (is_glued := _is_glued(call_id, name)) is not None
    ]
    return min(found)[2] if found else ""


def _is_glued(call_id: str, name: str) -> bool | None:
    """Tell whether a digit of a name runs into its number; `None` if the id lacks the name."""
    start = call_id.find(name)
    while start >= 0:
        after = call_id[start + len(name) :]
        if _BEFORE_NAME.fullmatch(call_id[:start]) and _AFTER_NAME.fullmatch(after):
            return name[-1:].isdigit() and after[:1].isdigit()
        start = call_id.find(name, start + 1)
    return None


def is_nameless(call_id: str) -> bool:
    """Tell whether an id does not name a tool at all, as `call_ab12CD` or `functions:0`."""
    return _NAMELESS.fullmatch(call_id) is not None
