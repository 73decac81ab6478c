"""Calls of the Gemma family, `call:f{a:<|"|>x<|"|>,n:2}` between markers."""

from backend.formats.dialects import JSON_CALLS, Literals, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

CALL = "call:"


def gemma(
    name: str, opener: str, closer: str, quote: str, clue: tuple[str, ...], leaks: tuple[str, ...]
) -> ToolFormat:
    """Return the format of one Gemma generation.

    Args:
        name: Name of the format.
        opener: Begins a call.
        closer: Ends it.
        quote: Encloses strings.
        clue: Texts in the chat template.
        leaks: The beginning of a tool result, which models may write themselves.
    """
    calls = Literals(
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
    return ToolFormat(
        name=name,
        clues=(in_template(*clue),),
        openers=(opener,),
        leads=(CALL,),
        closers=(closer,),
        leaks=leaks,
        tokens=(quote,),
        # Fine-tunes sometimes write JSON between the markers.
        readings=(
            Reading(dialect=JSON_CALLS, begins=('{"', "["), end=closer),
            Reading(dialect=calls, end=closer),
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
