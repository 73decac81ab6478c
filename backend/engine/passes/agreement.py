"""Agreement between ranks during the checks at load; a pass is computed by all or none."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from backend.engine.plan import MODEL_ERRORS

T = TypeVar("T")

Gather: TypeAlias = Callable[[float], Sequence[float]]
"""Takes a number of this rank, and returns those of all ranks, in the same order everywhere."""


class OtherRankError(RuntimeError):
    """A rank with other layers failed at a task that this one completed."""


class Ranks:
    """All processes of one model, or the only one.

    Every rank must make the same calls in the same order: each of them waits for the others.
    """

    def __init__(self, gather: Gather, *, are_several: bool = True) -> None:
        self._gather = gather
        self.are_several = are_several

    def any(self, flag: bool) -> bool:  # noqa: FBT001 (the only argument)
        """Tell whether some rank says yes."""
        return self.largest(flag) > 0

    def largest(self, value: float) -> float:
        """Return the largest number of any rank."""
        return max(self._gather(value))

    def fault(self, own: str | None) -> str | None:
        """Return this rank's fault, or another's if this rank has none."""
        return own or ("another rank cannot do it" if self.any(own is not None) else None)

    def attempt(self, build: Callable[[], T]) -> T:
        """Return the lazy result of a function, if every rank can build it.

        Raises:
            OtherRankError: Another rank could not, and this one could.
        """
        made: list[T] = []
        problem: Exception | None = None
        try:
            made.append(build())
        except MODEL_ERRORS as error:
            problem = error
        if self.any(problem is not None):
            raise problem or OtherRankError("another rank cannot do it")
        return made[0]


ALONE = Ranks(lambda value: (value,), are_several=False)
