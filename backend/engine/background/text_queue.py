"""Texts of many calls that wait for a pass through an encoder, and their grouping."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from backend.engine.rows.pacing import FairTurns

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
    """One call: its texts, at least one, and their results."""

    def __init__(
        self, number: int, texts: Sequence[Text], conclude: Callable[[Sequence[Any]], object]
    ) -> None:
        """Create a call; `conclude` turns the results of all texts, in order, into its answer."""
        self.texts = texts
        self.number = number
        # An ordered set: taken texts leave it from any position.
        self.waiting = dict.fromkeys(range(len(texts)))
        self._conclude = conclude
        self._results: dict[int, object] = {}

    @property
    def next_length(self) -> int:
        """Tokens of its next text; of a call with waiting texts."""
        return len(self.texts[next(iter(self.waiting))].token_ids)

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
    """Calls with waiting texts, in fair turns by their tokens."""

    def __init__(self) -> None:
        self._calls: FairTurns[TextCall] = FairTurns()

    def add(self, call: TextCall) -> None:
        """Queue all texts of a call."""
        self._calls.add(call)

    def drop(self, call: TextCall) -> None:
        """Forget the waiting texts of a call."""
        self._calls.remove(call)

    def take(self, max_tokens: int) -> list[QueuedText]:
        """Take the next text of the call whose turn it is, and those closest to it in length.

        Args:
            max_tokens: Of a pass with padding; a longer text runs alone.
        """
        first = self._calls.next(lambda call: call.next_length)
        calls = [first, *(call for call in self._calls if call is not first)]
        waiting = (QueuedText(call, index) for call in calls for index in call.waiting)
        lead, *others = islice(waiting, LOOKAHEAD)
        taken = [lead, *gather(lead, others, max_tokens)]
        for text in taken:
            del text.call.waiting[text.index]
            self._calls.spend(text.call, text.length)
        for call in calls:
            if not call.waiting:
                self._calls.remove(call)
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
