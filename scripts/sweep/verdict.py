"""Replies of the server and of a library, compared token by token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

# Two tokens whose log-probabilities differ by less may swap by rounding.
TIE = 1e-3


class Outcome(IntEnum):
    """The outcome of a comparison; larger values are worse."""

    EQUAL = 0
    TIE = 1
    REFUSED = 2
    CANNOT_RUN = 3
    WRONG = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with its explanation."""

    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        name = self.outcome.name.lower().replace("_", " ")
        return f"{name}: {self.detail}" if self.detail else name


@dataclass(frozen=True, slots=True)
class Expected:
    """A library's own greedy reply.

    Attributes:
        tokens: Their ids.
        gaps: The lead of each token's log-probability over the next best.
    """

    tokens: Sequence[int]
    gaps: Sequence[float]

    def is_like(self, other: "Expected") -> bool:
        """Tell whether another run gave the same reply with the same gaps."""
        gaps = zip(self.gaps, other.gaps, strict=False)
        same = list(self.tokens) == list(other.tokens)
        return same and all(abs(one - two) < TIE for one, two in gaps)

    def compared(self, case: str, tokens: Sequence[int]) -> Verdict:
        """Judge the server's tokens in a case; the library may have stopped earlier."""
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
