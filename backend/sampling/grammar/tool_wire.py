"""What a grammar needs to know of the way in which a model family writes tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backend.sampling.grammar.call_frame import CallFrame
from backend.sampling.grammar.free_text import FreeText
from backend.sampling.grammar.writer import GrammarWriter


class Surroundings(Protocol):
    """What may stand around calls."""

    @property
    def alone(self) -> str:
        """The expression of a reply without calls."""

    @property
    def after(self) -> str:
        """The expression of what stands behind calls."""

    def before(self, end: str) -> str:
        """Return the expression of what stands before calls, and of their opener."""


class MakeSurroundings(Protocol):
    """Makes the surroundings of calls."""

    def __call__(
        self, writer: GrammarWriter, ends: Sequence[str], /, *, never_first: str = ""
    ) -> Surroundings:
        """Make surroundings in which nothing looks like the beginning of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWire:
    """A tool-call wire.

    Attributes:
        frames: The ways to write calls.
        taboos: Further texts that readers take for the beginning of calls.
        lead: A regular expression of what they take for it where text begins.
        most_calls: How many calls a reply has room for, if there is a limit.
        surroundings: Makes what stands around calls.
    """

    frames: tuple[CallFrame, ...]
    taboos: tuple[str, ...] = ()
    lead: str = ""
    most_calls: int | None = None
    surroundings: MakeSurroundings = FreeText
