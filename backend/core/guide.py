"""Constraints on tokens: a rule, its grammar, a thinking budget, and the matcher for one reply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtTexts:
    """The texts that delimit a model's thoughts.

    Attributes:
        ends: Close it; the first is written when a thought is cut short.
        parting: The words written before that end, as the model was trained; part of the thought.
        rivals: Texts at a place where a thought could begin instead, in formats that announce every
            part of a reply.
        is_quotable: Whether a start inside Markdown code is ignored.
        reopens: Whether any start opens a thought. Otherwise one after a word or a sentence of the
            answer is text, except for these:
        later_starts: Starts that open one there too.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    parting: str = ""
    rivals: tuple[str, ...] = ()
    is_quotable: bool = True
    reopens: bool = False
    later_starts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    """The limit on thinking in one reply.

    Attributes:
        tokens: Limit for all thoughts of the reply together, without their starts and ends.
        is_open: Whether the prompt opened a thought.
        is_first: Whether a thought can only be the first part of the reply.
    """

    tokens: int
    texts: ThoughtTexts
    is_open: bool = False
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """How a model writes thoughts before its reply.

    Attributes:
        starts: Texts that open a thought; empty if the model opens none.
        is_open: Whether the prompt opened a thought, which then must be closed first.
        forbidden: Texts that thoughts do not contain, such as openers of calls, which end them.
        bridge: The text after a thought, in message formats; elsewhere newlines.
        answer: The text before an answer, with or without a thought, in message formats.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...]
    is_open: bool = False
    forbidden: tuple[str, ...] = ()
    bridge: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that may be called; `parameters` is the JSON text of their schema."""

    name: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRule:
    """The rule that a request sets for its reply; a grammar is made of it.

    Attributes:
        text: GBNF or a JSON schema for the answer; empty allows any.
        triggers: Texts from which on the answer follows it; empty means all of the answer.
        tools: Tools that may be called, whose arguments follow their schemas.
        must_call: Whether the reply has to be calls; otherwise they may be in place of an answer
            with a `text`, or among any other text.
        marks: The texts in which the checkpoint's own format may differ from others of its name.
        thought: The thoughts before the reply; `None` for a model without.
    """

    text: str = ""
    triggers: tuple[str, ...] = ()
    tools: tuple[OfferedTool, ...] = ()
    must_call: bool = False
    most_calls: int = 1
    format: str = ""
    marks: tuple[str, ...] = ()
    thought: Thought | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """The guide of a reply: a rule, or a thinking budget, or both.

    Attributes:
        is_told: Whether the log may quote the rule.
    """

    rule: ReplyRule | None = None
    budget: ThoughtBudget | None = None
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarParts:
    """The parts of a grammar, ready to be sent to another process.

    Attributes:
        rules: Its sources: the start, then the definitions; empty allows any text.
    """

    rules: tuple[str, ...] = ()
    budget: ThoughtBudget | None = None


class ReplyMatcher(Protocol):
    """Tells which tokens may come next in one reply; never raises."""

    def consume(self, token_id: int) -> bool:
        """Advance by a token; return whether it was allowed."""

    def fill_mask(self, row: Any) -> None:  # noqa: ANN401 (an array: the nouns know no NumPy)
        """Write one bit per token into a row of int32: 1 if the token may come next."""

    @property
    def may_force(self) -> bool:
        """Whether the next tokens may be forced, as far as a free check can tell."""

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next, or none if there is a choice."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, in order, may come next."""

    def step_back(self, count: int) -> None:
        """Undo the latest `count` tokens, none of which ended the reply."""

    @property
    def error(self) -> str | None:
        """The error that stopped the matcher, if any."""


@runtime_checkable
class ReplyGrammar(Protocol):
    """A compiled grammar; thread-safe."""

    @property
    def parts(self) -> GrammarParts:
        """The parts from which another process builds the same grammar."""

    def matcher(self) -> ReplyMatcher:
        """Return a matcher for one reply."""
