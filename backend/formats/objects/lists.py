"""A list of calls as JSON objects."""

from backend.formats.dialects import JSON_CALLS
from backend.formats.grammar import Frame


def list_of_calls(opener: str, closer: str = "") -> Frame:
    """Return the frame of a list between two markers."""
    return Frame(
        dialect=JSON_CALLS, opener=opener, begin=("[",), separator=(", ",), end=f"]{closer}"
    )
