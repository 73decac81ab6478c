"""Hunyuan 3: pairs as in GLM, but with an end of the name and a block around all calls."""

from backend.formats.dialects import Reading
from backend.formats.evidence import Clue
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged.pairs import pair_tags, pairs
from backend.formats.template import NAME


def hunyuan(
    name: str, aliases: tuple[str, ...], suffix: str = "", *, has_key_clue: bool = False
) -> ToolFormat:
    """Return the format of one kind of checkpoint.

    Args:
        name: Name of the format.
        aliases: Other names.
        suffix: Appended to all tag names.
        has_key_clue: Whether the evidence must also contain the tag of a key.
    """
    call, call_end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
    opener, closer = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
    name_end = f"<tool_sep{suffix}>"
    tags = pairs((call, NAME, f"{name_end}\n"), call_end, suffix=suffix)
    key_tag = pair_tags(tags)[0]
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=(Clue(anywhere=(name_end, key_tag) if has_key_clue else (name_end,)),),
        openers=(opener, call),
        closers=(closer, call_end),
        tokens=(name_end, *pair_tags(tags)),
        readings=(Reading(dialect=tags, end=closer),),
        grammar=CallGrammar(
            frames=(
                Frame(dialect=tags, opener=opener, call=("\n", *tags.call), end=f"\n{closer}"),
            ),
        ),
    )
