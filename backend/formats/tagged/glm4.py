"""GLM: a name and pairs, with newlines between the tags (4.5, 4.6) or without (4.7 and later)."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import Clue, in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged.pairs import KEY_TAG, pair_tags, pairs
from backend.formats.template import MAYBE_LINE, NAME


def glm(
    name: str, aliases: tuple[str, ...], opener: str, closer: str, clues: tuple[Clue, ...]
) -> ToolFormat:
    """Return the format of a family that writes like GLM between markers of its own."""
    tags = pairs((opener, NAME, MAYBE_LINE), closer)
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=clues,
        openers=(opener,),
        closers=(closer,),
        tokens=pair_tags(tags),
        # Small models sometimes write JSON between the markers.
        readings=(
            Reading(dialect=JSON_CALLS, begins=("{", "["), end=closer),
            Reading(dialect=tags),
        ),
        grammar=CallGrammar(
            frames=(Frame(dialect=tags, opener=opener, separator=(MAYBE_LINE,), is_block=False),),
        ),
    )


FORMAT = glm(
    name="glm4",
    aliases=("glm", "glm45", "glm47", "glm4_moe", "glm47_moe", "poolside_v1"),
    opener="<tool_call>",
    closer="</tool_call>",
    clues=(in_template(KEY_TAG),),
)
