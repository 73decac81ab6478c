"""Calls of the Gemma family, `call:f{a:<|"|>x<|"|>,n:2}` between markers."""

from backend.formats.dialects import JSON_CALLS, Literals, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

CALL = "call:"


def gemma(
    name: str,
    openers: tuple[str, ...],
    closers: tuple[str, ...],
    quote: str,
    clue: tuple[str, ...],
    leaks: tuple[str, ...],
) -> ToolFormat:
    """Return the format of one Gemma generation.

    Args:
        name: Name of the format.
        openers: Texts that begin a call; the first is correct, models write the others too.
        closers: Texts that end it.
        quote: Encloses strings.
        clue: Texts in the chat template.
        leaks: The beginning of a tool result, which models may write themselves.
    """
    calls = _calls(quote)
    opener, closer, *others = (openers[0], *closers)
    return ToolFormat(
        name=name,
        clues=(in_template(*clue),),
        openers=openers,
        leads=(CALL,),
        closers=closers,
        leaks=leaks,
        tokens=(quote,),
        # Fine-tunes sometimes write JSON between the markers.
        readings=(
            Reading(dialect=JSON_CALLS, begins=('{"', "["), end=closer, other_ends=tuple(others)),
            Reading(dialect=calls, end=closer, other_ends=tuple(others)),
        ),
        grammar=CallGrammar(
            frames=(
                Frame(
                    dialect=calls,
                    opener=opener,
                    call=(*calls.call, closer),
                    separator=(opener,),
                    is_block=False,
                ),
            ),
        ),
        is_quotable=False,
    )


def _calls(quote: str) -> Literals:
    return Literals(
        call=(CALL, NAME, "{", ARGUMENTS, "}"),
        argument=(KEY, ":", VALUE),
        comma=",",
        colon=":",
        # Small models fall back to JSON's quotes.
        quotes=(quote, '"'),
        constants={"true": ("true",), "false": ("false",), "null": ("null",)},
        has_bare_text=True,
        sorts_names=True,
    )
