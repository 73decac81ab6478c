"""Arguments as pairs, `<arg_key>a</arg_key><arg_value>…</arg_value>`."""

from backend.formats.dialects import Tags
from backend.formats.template import ARGUMENTS, KEY, MAYBE_LINE, VALUE, Template

KEY_TAG = "<arg_key>"


def pairs(begin: Template, end: str, prefix: str = "", suffix: str = "") -> Tags:
    """Return calls whose arguments are pairs.

    Args:
        begin: The text of a call up to its arguments.
        end: The text after the arguments.
        prefix: Precedes the name of each tag.
        suffix: Follows the name of each tag.
    """
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    return Tags(
        call=(*begin, ARGUMENTS, end),
        parameter=(
            *(f"<{key}", KEY, f"</{key}", MAYBE_LINE),
            *(f"<{value}", VALUE, f"</{value}", MAYBE_LINE),
        ),
    )


def pair_tags(tags: Tags) -> tuple[str, ...]:
    """Return the tags around keys and values."""
    return tuple(part for part in tags.parameter if isinstance(part, str))
