"""Where arguments are written."""

from dataclasses import dataclass

from backend.formats.dialects import Reading
from backend.formats.template import Template


@dataclass(frozen=True, slots=True)
class CallSite:
    """The surroundings of the arguments of a call.

    Attributes:
        reading: How a reader reads the call.
        opener: The opener of the calls.
        after: What follows the arguments.
        foreign: Sequences that end the surroundings, wherever they occur.
    """

    reading: Reading
    opener: str
    after: Template
    foreign: tuple[Template, ...] = ()
