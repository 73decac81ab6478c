"""One way to write calls: what stands before, between and behind them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backend.sampling.grammar.call_template import Slot, Template, fill
from backend.sampling.grammar.tool_parameters import ArgumentsWriter, Parameters
from backend.sampling.grammar.tools_json import json_arguments, json_text
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import (
    Expression,
    GrammarWriter,
    Piece,
    alternatives,
    chain,
    repeated,
    sequence,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """One way to write calls.

    Attributes:
        opener: What begins them.
        begin: What stands between the opener and the first call.
        call: One call.
        separator: What stands between two calls.
        end: What ends them.
        arguments: How the arguments in a call are written.
        needs: A marker without which nobody writes so.
        lacks: A marker with which nobody does.
        is_lead: Whether the opener counts only where text begins.
        is_block: Whether the calls behind the opener are one block; else each has an opener, and
            between two of them there may be text instead of the separator.
        is_lapse: Whether it is a mistake of models, and allowed only where text is.
    """

    opener: str
    begin: Template = ()
    call: Template
    separator: Template = ()
    end: str = ""
    arguments: ArgumentsWriter = json_arguments
    needs: str = ""
    lacks: str = ""
    is_lead: bool = False
    is_block: bool = True
    is_lapse: bool = False

    def fits(self, vocabulary: Vocabulary) -> bool:
        """Return whether a model with these tokens writes so."""
        markers = vocabulary.markers
        return not (self.needs and self.needs not in markers) and self.lacks not in markers


class FramedCalls:
    """The calls of some tools in a frame."""

    def __init__(
        self, frame: CallFrame, tools: Sequence[Parameters], writer: GrammarWriter
    ) -> None:
        """Define the arguments of the tools.

        Raises:
            GrammarError: Those of one cannot be enforced.
        """
        self.frame = frame
        self._writer = writer
        self._arguments = [(tool.tool, frame.arguments(tool, writer)) for tool in tools]

    def whole(self, least: int, most: int) -> str:
        """Return the expression of so many calls with their opener, at least one."""
        return self._calls((self.frame.opener, *self.frame.begin), least, most)

    def behind_opener(self, least: int, most: int) -> str:
        """Return the expression of so many calls without it, at least one."""
        return self._calls(self.frame.begin, least, most)

    def _calls(self, begin: Template, least: int, most: int) -> str:
        others = repeated(self._any_call(self.frame.separator), max(least - 1, 0), most - 1)
        return chain(self._any_call(begin), others, self._writer.last_text(self.frame.end))

    def _any_call(self, before: Template) -> str:
        """Return the expression of a call of any tool, with something before it."""
        return self._writer.rule(alternatives(self._each_call(before)))

    def _each_call(self, before: Template) -> Iterator[str]:
        for name, arguments in self._arguments:
            values: dict[Slot, Piece] = {
                Slot.NAME: name,
                Slot.QUOTED_NAME: json_text(name),
                Slot.ARGUMENTS: Expression(arguments),
            }
            yield sequence(fill((*before, *self.frame.call), values, self._writer))
