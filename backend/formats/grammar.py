"""The ways in which a grammar lets a model write calls."""

from dataclasses import dataclass

from backend.formats.dialects import Dialect, Messages
from backend.formats.template import Template


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """The place of an answer, where calls have a place of their own.

    Attributes:
        begin: The text before the answer.
        end: The text between it and the calls.
        may_be_open: Whether a prompt may end inside of it.
        closes: Whether it ends with the same text where no calls follow.
    """

    begin: str
    end: str
    may_be_open: bool = False
    closes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One way to write calls.

    Attributes:
        dialect: The syntax of arguments and, unless `call` says otherwise, of calls.
        opener: The text that begins them; it may be the beginning of the first call.
        begin: The text between the opener and the first call.
        call: One call.
        separator: The text between two calls.
        end: The text that ends them.
        needs: A marker without which no model writes so.
        lacks: A marker with which no model writes so.
        is_lead: Whether the opener counts only where text begins.
        is_block: Whether the calls after the opener are one block. If not, each has an opener,
            and text may stand between two of them in place of the separator.
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
        frames: The ways to write calls.
        most_calls: The number of calls that a reply has room for, if there is a limit.
        around: The text around calls, unless it is free: messages, of which calls are
            some, or a section for an answer before the calls.
    """

    frames: tuple[Frame, ...]
    most_calls: int | None = None
    around: Messages | Section | None = None


def calls_between(
    opener: str, closer: str, dialect: Dialect, *, needs: str = "", lacks: str = ""
) -> Frame:
    """Return the frame of calls that stand on lines of their own, each between two markers.

    Args:
        opener: The marker before each call.
        closer: The marker after it.
        dialect: The syntax of a call.
        needs: A marker without which no model writes so.
        lacks: A marker with which no model writes so.
    """
    return Frame(
        dialect=dialect,
        opener=opener,
        call=("\n", *dialect.call, f"\n{closer}"),
        separator=(f"\n{opener}",),
        needs=needs,
        lacks=lacks,
        is_block=False,
    )
