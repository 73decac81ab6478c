"""The rule that a request sets for the calls in its reply."""

from dataclasses import dataclass

MAX_PARALLEL_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """The number of calls in a reply.

    Attributes:
        least: Minimum number.
        most: Maximum number: without one, a model at a high temperature does not stop.
        has_text: Whether text is allowed around calls; otherwise the reply is only calls.
    """

    least: int = 0
    most: int = MAX_PARALLEL_CALLS
    has_text: bool = True
