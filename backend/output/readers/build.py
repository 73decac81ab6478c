"""Builds the reader of a format's calls."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import assert_never

from backend.formats.dialects import (
    Literals,
    Markup,
    Messages,
    NamedJson,
    Objects,
    Reading,
    Tags,
)
from backend.formats.format import ToolFormat
from backend.output.readers.calls.call_block import CallBlockReader
from backend.output.readers.calls.literal_call import LiteralCallReader
from backend.output.readers.calls.markup import MarkupReader
from backend.output.readers.calls.tagged import TaggedReader
from backend.output.readers.choice import ChoiceReader
from backend.output.readers.messages.frames import MessageFrames
from backend.output.readers.messages.reader import MessageReader
from backend.output.readers.reader import MakeReader, Reader, ReaderContext
from backend.output.readers.shapes.json_calls import named_block, object_block
from backend.output.readers.shapes.literals import literal_dialect
from backend.output.readers.shapes.tags import tagged_dialect
from backend.output.warn import warn_once


def make_reader(tool_format: ToolFormat, context: ReaderContext) -> Reader:
    """Return the reader of the text after an opener."""
    opener = context.opener
    if tool_format.name_lead and opener not in (*tool_format.openers, *tool_format.leads):
        opener = tool_format.name_lead
    return _reader_at(tool_format, opener)(context)


@lru_cache
def _reader_at(tool_format: ToolFormat, opener: str) -> MakeReader:
    """Return the factory of the reader after an opener."""
    readings = [
        reading
        for reading in tool_format.readings
        if not reading.openers or opener in reading.openers
    ]
    choices = {begin: _factory(reading) for reading in readings for begin in reading.begins}
    otherwise = _factory(next(reading for reading in readings if not reading.begins))
    if not choices:
        return otherwise
    return partial(ChoiceReader, choices=choices, otherwise=otherwise)


def _factory(reading: Reading) -> Callable[[ReaderContext], Reader]:
    """Return the factory of a reader of one dialect."""
    dialect = reading.dialect
    match dialect:
        case Objects():
            return partial(CallBlockReader, block=object_block(reading, dialect))
        case NamedJson():
            return partial(CallBlockReader, block=named_block(reading, dialect))
        case Tags():
            return partial(TaggedReader, dialect=tagged_dialect(reading, dialect))
        case Literals():
            return partial(LiteralCallReader, dialect=literal_dialect(reading, dialect))
        case Markup(text):
            return partial(MarkupReader, markup=text)
        case Messages(calls=calls):
            make_block = _factory(calls) if calls else None
            return partial(MessageReader, frames=MessageFrames(dialect, make_block, warn_once))
        case _:
            assert_never(dialect)
