"""Texts of many calls that wait for a pass through an encoder, and their grouping."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import mlx.core as mx

# Texts considered as companions of the first, and maximum texts in a pass.
LOOKAHEAD = 1024
MAX_ROWS = 128
# Maximum padding of a row, as a share and in tokens.
PADDED_SHARE = 0.25
PADDED_TOKENS = 8


class Measured(Protocol):
    """Anything with a length in tokens."""

    @property
    def length(self) -> int:
        """Its number of tokens."""


AnyText = TypeVar("AnyText", bound=Measured)


class Text(Protocol):
    """Input that an encoder reads in one piece."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens, at least one."""


class TextCall:
    """One call: its texts, at least one, and their results.

    Attributes:
        spent: Its tokens that were taken, and the clock of its queue when it came.
    """

    def __init__(
        self, number: int, texts: Sequence[Text], conclude: Callable[[Sequence[Any]], object]
    ) -> None:
        """Create a call; `conclude` turns the results of all texts, in order, into its answer."""
        self.texts = texts
        self.number = number
        self.spent = 0.0
        # An ordered set: taken texts leave it from any position.
        self.waiting = dict.fromkeys(range(len(texts)))
        self._conclude = conclude
        self._results: dict[int, object] = {}

    @property
    def due(self) -> float:
        """Its place on the clock of its queue; of a call with waiting texts."""
        return self.spent + len(self.texts[next(iter(self.waiting))].token_ids)

    def note(self, index: int, result: object) -> None:
        """Store the result of a text."""
        self._results[index] = result

    @property
    def is_complete(self) -> bool:
        """Whether all results are available."""
        return len(self._results) == len(self.texts)

    def answer(self) -> object:
        """Return the answer of a complete call."""
        return self._conclude([self._results[i] for i in range(len(self.texts))])


@dataclass(frozen=True, eq=False, slots=True)
class QueuedText:
    """A text, by its index in its call."""

    call: TextCall
    index: int

    @property
    def text(self) -> Text:
        """The text to read."""
        return self.call.texts[self.index]

    @property
    def length(self) -> int:
        """Its number of tokens."""
        return len(self.text.token_ids)


class TextQueue:
    """Calls with waiting texts; a pass is led by the one with the fewest tokens since it came.

    A short call so waits for no long ones. The clock is what each call would have had by now if all
    had had the same: no later calls put one off for ever.
    """

    def __init__(self) -> None:
        self._calls: list[TextCall] = []
        self._clock = 0.0

    def add(self, call: TextCall) -> None:
        """Queue all texts of a call."""
        call.spent = self._clock
        self._calls.append(call)

    def drop(self, call: TextCall) -> None:
        """Forget the waiting texts of a call."""
        if call in self._calls:
            self._calls.remove(call)

    def take(self, max_tokens: int) -> list[QueuedText]:
        """Take the first text of the call that is due, and those closest to it in length.

        Args:
            max_tokens: Of a pass with padding; a longer text runs alone.
        """
        first = min(self._calls, key=lambda call: call.due)
        calls = [first, *(call for call in self._calls if call is not first)]
        waiting = (QueuedText(call, index) for call in calls for index in call.waiting)
        lead, *others = islice(waiting, LOOKAHEAD)
        taken = [lead, *gather(lead, others, max_tokens)]
        for text in taken:
            del text.call.waiting[text.index]
            text.call.spent += text.length
            self._clock += text.length / len(self._calls)
        self._calls = [call for call in self._calls if call.waiting]
        return taken


def gather(lead: AnyText, others: Sequence[AnyText], max_tokens: int) -> list[AnyText]:
    """Return the other texts that share a pass with a text: those closest to it in length."""
    lengths = [lead.length]
    company = []
    for text in heapq.nsmallest(MAX_ROWS - 1, others, key=lambda t: abs(t.length - lead.length)):
        if _fits([*lengths, text.length], max_tokens):
            lengths.append(text.length)
            company.append(text)
    return company


def padded(rows: Sequence[Sequence[int]], filler: int = 0) -> mx.array:
    """Return rows as an array [B, T], padded at the end."""
    width = max(map(len, rows))
    return mx.array([[*row, *[filler] * (width - len(row))] for row in rows])


def _fits(lengths: Sequence[int], max_tokens: int) -> bool:
    width = max(lengths)
    allowed = max(PADDED_SHARE * width, PADDED_TOKENS)
    return width - min(lengths) <= allowed and width * len(lengths) <= max_tokens
