"""The rule that a request sets for the calls of its reply."""

from dataclasses import dataclass

MAX_PARALLEL_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """How many calls a reply has.

    Attributes:
        least: How many at least.
        most: And at most: without a limit, a model at a high temperature does not come to an end.
        has_text: Whether there may be text around calls; else there is nothing but calls.
    """

    least: int = 0
    most: int = MAX_PARALLEL_CALLS
    has_text: bool = True
