"""Replies of the server and of a library, compared token by token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

# Two tokens whose log-probabilities differ by less may change places with rounding.
TIE = 1e-3


class Outcome(IntEnum):
    """What a comparison shows; the larger value is the worse one."""

    EQUAL = 0
    TIE = 1
    REFUSED = 2
    CANNOT_RUN = 3
    WRONG = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome and what there is to say about it."""

    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        name = self.outcome.name.lower().replace("_", " ")
        return f"{name}: {self.detail}" if self.detail else name


@dataclass(frozen=True, slots=True)
class Expected:
    """A greedy reply of a library by itself.

    Attributes:
        tokens: Their ids.
        gaps: By how much the log-probability of each was above that of the next best.
    """

    tokens: Sequence[int]
    gaps: Sequence[float]

    def is_like(self, other: "Expected") -> bool:
        """Tell whether another run has given the same reply, as sure of every token."""
        gaps = zip(self.gaps, other.gaps, strict=False)
        same = list(self.tokens) == list(other.tokens)
        return same and all(abs(one - two) < TIE for one, two in gaps)

    def compared(self, case: str, tokens: Sequence[int]) -> Verdict:
        """Judge the tokens that the server gave in a case; a library may have stopped before."""
        pairs = zip(self.tokens, tokens, strict=False)
        index = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if index is None:
            if len(tokens) >= len(self.tokens) > 0:
                return Verdict(Outcome.EQUAL)
            return Verdict(Outcome.WRONG, f"{case}: {len(tokens)} of {len(self.tokens)} tokens")
        gap = self.gaps[index]
        outcome = Outcome.TIE if gap < TIE else Outcome.WRONG
        return Verdict(outcome, f"{case}: token {index}, a gap of {gap:.2g}")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts; of equals the first."""
    return max(verdicts, key=lambda verdict: verdict.outcome)
