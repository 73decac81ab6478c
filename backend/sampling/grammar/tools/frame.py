"""Calls in a frame: the texts before, between and after them."""

from collections.abc import Iterator, Sequence

from backend.formats.dialects import Messages, Reading
from backend.formats.format import ToolFormat
from backend.formats.grammar import Frame
from backend.formats.template import ARGUMENTS, Slot, Template, split_at
from backend.sampling.grammar.tools.arguments import arguments_in
from backend.sampling.grammar.tools.json_values import json_text
from backend.sampling.grammar.tools.parameters import Parameters, PartError
from backend.sampling.grammar.tools.site import CallSite
from backend.sampling.grammar.tools.template import fill
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import (
    GrammarWriter,
    Piece,
    alternatives,
    chain,
    repeated,
    sequence,
)


def is_written(frame: Frame, vocabulary: Vocabulary) -> bool:
    """Return whether a model with these tokens writes calls in this frame."""
    markers = vocabulary.markers
    return not (frame.needs and frame.needs not in markers) and frame.lacks not in markers


class FramedCalls:
    """Calls of some tools in a frame."""

    def __init__(
        self,
        frame: Frame,
        tool_format: ToolFormat,
        tools: Sequence[Parameters],
        writer: GrammarWriter,
    ) -> None:
        """Define the arguments of the tools.

        Args:
            frame: Texts around the calls.
            tool_format: The model's format.
            tools: Parameters of the tools.
            writer: Collects the definitions.

        Raises:
            GrammarError: The arguments of a tool cannot be enforced.
        """
        self.frame = frame
        self._writer = writer
        call = frame.call or frame.dialect.call
        self._call, after = split_at(call, ARGUMENTS)
        self._site = call_site(frame, tool_format, after)
        self._arguments = [(tool.tool, self._arguments_of(tool)) for tool in tools]

    def _arguments_of(self, tool: Parameters) -> str:
        """Return the expression of a tool's arguments; those of a lapse are held less strictly."""
        try:
            return arguments_in(self.frame.dialect, self._site, tool, self._writer)
        except PartError as error:
            if not self.frame.is_lapse:
                raise
            return self._arguments_of(tool.without(error.pointer, "cannot be held in a lapse"))

    def whole(self, least: int, most: int) -> str:
        """Return the expression of `least` to `most` calls (at least one) with their opener."""
        return self._calls((self.frame.opener, *self.frame.begin), least, most)

    def after_opener(self, least: int, most: int) -> str:
        """Return the expression of `least` to `most` calls (at least one) without the opener."""
        return self._calls(self.frame.begin, least, most)

    def _calls(self, begin: Template, least: int, most: int) -> str:
        frame = self.frame
        first = self._any_call((*begin, *_without(frame.opener, self._call)))
        other = self._any_call((*frame.separator, *self._call))
        others = repeated(other, max(least - 1, 0), most - 1)
        return chain(first, others, self._writer.last_text(frame.end))

    def _any_call(self, template: Template) -> str:
        """Return the expression of a call to any of the tools."""
        return self._writer.rule(alternatives(self._each_call(template)))

    def _each_call(self, template: Template) -> Iterator[str]:
        for name, arguments in self._arguments:
            values: dict[Slot, Piece] = {
                Slot.NAME: name,
                Slot.QUOTED_NAME: json_text(name),
            }
            yield chain(sequence(fill(template, values, self._writer)), arguments)


def call_site(frame: Frame, tool_format: ToolFormat, after: Template) -> CallSite:
    """Return the surroundings of the arguments in a frame."""
    around = tool_format.grammar and tool_format.grammar.around
    if isinstance(around, Messages):
        reading = around.calls or Reading(dialect=frame.dialect)
        opener = next(iter(reading.openers), frame.opener)
        return CallSite(reading, opener, after, tuple((token,) for token in around.tokens))
    for reading in tool_format.readings:
        is_opened = not reading.openers or frame.opener in reading.openers
        if reading.dialect is frame.dialect and is_opened:
            return CallSite(reading, frame.opener, after)
    return CallSite(Reading(dialect=frame.dialect), frame.opener, after)


def _without(opener: str, call: Template) -> Template:
    """Return the rest of a call after its opener, which may be the call's beginning."""
    first, *rest = call
    if isinstance(first, str) and first.startswith(opener):
        return (first.removeprefix(opener), *rest)
    return call
