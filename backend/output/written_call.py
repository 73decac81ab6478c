"""Finds a model's format by the call that its chat template renders."""

import json
import re
from collections.abc import Iterable, Sequence

from backend.core.delta import Delta, ToolCallDelta
from backend.core.example_call import EXAMPLE_CALL, EXAMPLE_TOOL
from backend.formats.format import NO_REASONING, ToolFormat
from backend.formats.grammar import Frame
from backend.formats.template import Characters, Id, Maybe, Part, Slot, Template, text_of
from backend.output.format import OutputFormat
from backend.output.routing.router import Router

_ARGUMENTS = json.loads(EXAMPLE_CALL.arguments)
_SLOTS = {
    Slot.NAME: EXAMPLE_CALL.name,
    Slot.QUOTED_NAME: f'"{EXAMPLE_CALL.name}"',
    Slot.ARGUMENTS: ".*".join(("", *(word for pair in _ARGUMENTS.items() for word in pair), "")),
    Slot.INDEX: r"\d+",
}


def find_by_call(formats: Sequence[ToolFormat], written_call: str) -> ToolFormat | None:
    """Return the format that writes most nearly this call, and reads it.

    Args:
        formats: Formats in order of preference.
        written_call: The template's rendering of `EXAMPLE_CALL`.
    """
    closest = max(formats, key=lambda known: _closeness(known, written_call), default=None)
    is_close = closest is not None and _closeness(closest, written_call) > 0
    return closest if is_close else None


def _closeness(tool_format: ToolFormat, written_call: str) -> int:
    """Return how many fixed characters of a format's call occur in a text that it reads."""
    frames = tool_format.grammar.frames if tool_format.grammar else ()
    text = _squeezed(written_call)
    lengths = [
        len(_squeezed(text_of(whole)))
        for whole in (_whole_call(frame) for frame in frames if not frame.is_lapse)
        if re.search(_pattern(whole), text)
    ]
    return max(lengths) if lengths and can_read(tool_format, written_call) else 0


def can_read(tool_format: ToolFormat, written_call: str) -> bool:
    """Tell whether a format reads `EXAMPLE_CALL`, and no other call, in a text."""
    tools = {EXAMPLE_TOOL.name: EXAMPLE_TOOL.parameters}
    router = Router(OutputFormat(NO_REASONING, tool_format), tools=tools)
    deltas = [*router.feed(written_call), *router.finish(truncated=False)]
    is_whole = router.completed_calls == {0}
    return is_whole and _call_of(deltas) == (EXAMPLE_CALL.name, _ARGUMENTS)


def _call_of(deltas: Iterable[Delta]) -> tuple[str, object]:
    pieces = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    name = "".join(piece.name for piece in pieces)
    return name, json.loads("".join(piece.arguments for piece in pieces))


def _whole_call(frame: Frame) -> Template:
    """Return the text of one call from its opener to its end."""
    call = frame.call or frame.dialect.call
    has_opener = text_of(call[:1]).startswith(frame.opener)
    opener = () if has_opener else (frame.opener,)
    return (*opener, *frame.begin, *call, frame.end)


def _pattern(template: Template) -> str:
    return "".join(map(_part_pattern, template))


def _part_pattern(part: Part) -> str:
    match part:
        case str():
            return re.escape(_squeezed(part))
        case Slot():
            return _SLOTS.get(part, ".*")
        case Maybe(template):
            return f"(?:{_pattern(template)})?"
        case Id(template):
            return _pattern(template)
        case Characters(pattern):
            return f"(?:{pattern})"


def _squeezed(text: str) -> str:
    """Return a text without whitespace, in which templates and models vary."""
    return "".join(text.split())
