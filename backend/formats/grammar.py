"""How a grammar lets a model write calls."""

from dataclasses import dataclass

from backend.formats.dialects import Dialect, Messages
from backend.formats.template import Template


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """The section of an answer, in formats whose calls have their own section.

    Attributes:
        begin: The text before the answer.
        end: The text between it and the calls.
        may_be_open: Whether a prompt may end inside it.
        closes: Whether the same text ends it if no calls follow.
    """

    begin: str
    end: str
    may_be_open: bool = False
    closes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One way to write calls.

    Attributes:
        dialect: Syntax of the arguments and, unless `call` overrides it, of calls.
        opener: The text before the calls; it may be the beginning of the first call.
        begin: The text between the opener and the first call.
        separator: The text between two calls.
        end: The text after the calls.
        needs: A marker that models must have to write this way.
        lacks: A marker that models must not have to write this way.
        is_lead: Whether the opener counts only at the start of the text.
        is_block: Whether the calls after the opener form one block. Otherwise each call has an
            opener, and text may replace the separator between them.
        is_lapse: Whether it is a mistake of models, and allowed only where text is.
    """

    dialect: Dialect
    opener: str
    begin: Template = ()
    call: Template = ()
    separator: Template = ()
    end: str = ""
    needs: str = ""
    lacks: str = ""
    is_lead: bool = False
    is_block: bool = True
    is_lapse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallGrammar:
    """The strict side of a format.

    Attributes:
        most_calls: Limit of calls in a reply, if there is one.
        around: The text around calls, if it is not free: messages, some of which are calls, or
            an answer section before the calls.
    """

    frames: tuple[Frame, ...]
    most_calls: int | None = None
    around: Messages | Section | None = None


def calls_between(
    opener: str, closer: str, dialect: Dialect, *, needs: str = "", lacks: str = ""
) -> Frame:
    """Return the frame of calls on separate lines, each between two markers."""
    return Frame(
        dialect=dialect,
        opener=opener,
        call=("\n", *dialect.call, f"\n{closer}"),
        separator=(f"\n{opener}",),
        needs=needs,
        lacks=lacks,
        is_block=False,
    )
