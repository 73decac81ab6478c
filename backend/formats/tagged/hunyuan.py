"""Hunyuan 3: pairs as in GLM, but with an end of the name and a block around all calls."""

from collections.abc import Callable

from backend.formats.dialects import Reading
from backend.formats.evidence import Clue, FormatEvidence
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged.pairs import pair_tags, pairs
from backend.formats.template import MAYBE_LINE, NAME


def hunyuan(
    name: str,
    aliases: tuple[str, ...],
    suffix: str = "",
    *,
    has_key_clue: bool = False,
    has_name_end: bool = True,
    own: Callable[[FormatEvidence], ToolFormat | None] | None = None,
) -> ToolFormat:
    """Return the format of one kind of checkpoint.

    Args:
        name: Name of the format.
        aliases: Other names.
        suffix: Appended to all tag names.
        has_key_clue: Whether the evidence must also contain the tag of a key.
        has_name_end: Whether a tag ends the name.
        own: Finds the format of one checkpoint, in place of clues.
    """
    call, call_end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
    opener, closer = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
    name_end = f"<tool_sep{suffix}>"
    after_name = f"{name_end}\n" if has_name_end else MAYBE_LINE
    tags = pairs((call, NAME, after_name), call_end, suffix=suffix)
    key_tag = pair_tags(tags)[0]
    clue = Clue(anywhere=(name_end, key_tag) if has_key_clue else (name_end,))
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=() if own else (clue,),
        own=own,
        openers=(opener, call),
        closers=(closer, call_end),
        tokens=(*((name_end,) if has_name_end else ()), *pair_tags(tags)),
        readings=(Reading(dialect=tags, end=closer),),
        grammar=CallGrammar(
            frames=(
                Frame(dialect=tags, opener=opener, call=("\n", *tags.call), end=f"\n{closer}"),
            ),
        ),
    )
