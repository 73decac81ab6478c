"""Constraints on tokens: a grammar, a thinking budget, and the matcher of both for one reply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtTexts:
    """The texts by which a model's thoughts are known.

    Attributes:
        starts: Open a thought.
        ends: Close it; the first is written where a thought is broken off.
        parting: The words before it then, as the model was trained; a part of the thought.
        rivals: Stand where a thought could begin, in formats that announce every part of a reply.
        is_quotable: Whether a start in Markdown code opens nothing.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    parting: str = ""
    rivals: tuple[str, ...] = ()
    is_quotable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    """The most that a model may think in one reply.

    Attributes:
        tokens: Of all thoughts of the reply together, without their starts and ends.
        is_open: Whether the prompt opened a thought.
        is_first: Whether a thought can only be the first part of the reply.
    """

    tokens: int
    texts: ThoughtTexts
    is_open: bool = False
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarParts:
    """The parts of a grammar, as it travels.

    Attributes:
        rules: It was compiled from these: its start, then its definitions; none allow any text.
        budget: For thoughts, if there is one.
    """

    rules: tuple[str, ...] = ()
    budget: ThoughtBudget | None = None


class ReplyMatcher(Protocol):
    """Tells which tokens may come next in one reply; never raises."""

    def consume(self, token_id: int) -> bool:
        """Advance by a token, and return whether it was allowed."""

    def fill_mask(self, row: Any) -> None:  # noqa: ANN401 (an array: the nouns know no NumPy)
        """Write one bit per token into a row of int32: 1 if it may come next."""

    @property
    def may_force(self) -> bool:
        """Whether tokens may be forced next, as far as can be told at no cost."""

    def forced(self) -> list[int]:
        """Return the tokens of the only text that may come next, if there is only one."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after another."""

    def step_back(self, count: int) -> None:
        """Return to where it was before the latest `count` tokens; none of them ended the reply."""

    @property
    def error(self) -> str | None:
        """The error that stopped the matcher, if any."""


@runtime_checkable
class ReplyGrammar(Protocol):
    """A compiled grammar; safe from any thread."""

    @property
    def parts(self) -> GrammarParts:
        """From which another process makes the same grammar."""

    def matcher(self) -> ReplyMatcher:
        """Return a matcher for one reply."""
