"""Tells whether a tool can be called by its name: whether a format reads the call it writes."""

import json
from collections.abc import Mapping
from functools import lru_cache

from backend.core.step import ToolCallDelta
from backend.formats.dialects import Characters, Id, NamedJson, Objects, Part, Slot, Tags, Template
from backend.formats.format import NO_REASONING, Frame, ToolFormat
from backend.output.reply_format import OutputFormat
from backend.output.router import Router

# Allowed wherever a call has a text that the model chooses.
_CHOSEN = "a1b2c3d4"


@lru_cache(maxsize=4096)
def can_carry(tool_format: ToolFormat, name: str) -> bool:
    """Tell whether a call by this name is read as one; it is unless the syntax is known."""
    return not tool_format.frames or any(
        _reads(tool_format, frame, name) for frame in tool_format.frames
    )


def _reads(tool_format: ToolFormat, frame: Frame, name: str) -> bool:
    router = Router(OutputFormat(NO_REASONING, tool_format), tools={name: {}})
    text = _written((*frame.first_call, frame.end), frame, name)
    deltas = [*router.feed(text), *router.finish(truncated=False)]
    called = "".join(delta.name for delta in deltas if isinstance(delta, ToolCallDelta))
    return called == name and router.completed_calls == {0}


def _written(template: Template, frame: Frame, name: str) -> str:
    """Return a call without arguments."""
    dialect = frame.dialect
    has_object = isinstance(dialect, Objects | NamedJson)
    slots: dict[Part, str] = {
        Slot.NAME: dialect.spelled(name) if isinstance(dialect, Tags) else name,
        Slot.QUOTED_NAME: json.dumps(name, ensure_ascii=False),
        Slot.ARGUMENTS: "{}" if has_object else "",
        Slot.INDEX: "0",
    }
    return "".join(_text(part, frame, name, slots) for part in template)


def _text(part: Part, frame: Frame, name: str, slots: Mapping[Part, str]) -> str:
    match part:
        case str():
            return part
        case Id(template):
            return _written(template, frame, name)
        case Characters():
            return _CHOSEN
        case _:
            return slots.get(part, "")
