"""Templates of calls: the text of a call as a model writes it, with open parts."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias


class Slot(Enum):
    """An open part of a call.

    Attributes:
        QUOTED_NAME: The same, as a JSON string.
        TYPE: The type of that value, as the dialect spells it.
    """

    NAME = auto()
    QUOTED_NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()
    VALUE = auto()
    TYPE = auto()
    INDEX = auto()


@dataclass(frozen=True, slots=True)
class Maybe:
    """A part that may be missing."""

    template: "Template"


@dataclass(frozen=True, slots=True)
class Characters:
    """Text that matches a regular expression, in syntax common to Python and llguidance."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Id:
    """The id of the call."""

    template: "Template"


Part: TypeAlias = str | Slot | Maybe | Characters | Id
Template: TypeAlias = tuple[Part, ...]

NAME, QUOTED_NAME, ARGUMENTS = Slot.NAME, Slot.QUOTED_NAME, Slot.ARGUMENTS
KEY, VALUE, TYPE, INDEX = Slot.KEY, Slot.VALUE, Slot.TYPE, Slot.INDEX
MAYBE_LINE, MAYBE_SPACE = Maybe(("\n",)), Maybe((" ",))


def split_at(template: Template, slot: Slot) -> tuple[Template, Template]:
    """Return the parts before and after a slot."""
    place = template.index(slot)
    return template[:place], template[place + 1 :]


def text_of(template: Template) -> str:
    """Return the fixed text of a template, without open and optional parts."""
    return "".join(part for part in template if isinstance(part, str))
