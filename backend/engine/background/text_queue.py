"""Texts of many calls that wait for a pass through an encoder, and which of them go together."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import mlx.core as mx

# So many texts are looked at to find company for the first, and so many go together.
LOOKAHEAD = 1024
MAX_ROWS = 128
# How much of a row of a pass, or how many tokens of it, may be padding.
PADDED_SHARE = 0.25
PADDED_TOKENS = 8


class Measured(Protocol):
    """What has a length in tokens."""

    @property
    def length(self) -> int:
        """How many tokens it has."""


AnyText = TypeVar("AnyText", bound=Measured)


class Text(Protocol):
    """What an encoder reads in one piece."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens, at least one."""


class TextCall:
    """One call: its texts, at least one, and what became of them.

    Attributes:
        texts: In their order.
        reply: Gets the answer; cancelling it is how the caller leaves.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        reply: "Future[Any]",
        conclude: Callable[[Sequence[Any]], object],
    ) -> None:
        """Begin with all texts waiting.

        Args:
            texts: To be computed.
            reply: Where the answer goes.
            conclude: Makes the answer of the results of all texts, in their order.
        """
        self.texts = texts
        self.reply = reply
        # An ordered set: what was taken leaves it from any place.
        self.waiting = dict.fromkeys(range(len(texts)))
        self._conclude = conclude
        self._results: dict[int, object] = {}

    def note(self, index: int, result: object) -> None:
        """Take the result of a text."""
        self._results[index] = result

    @property
    def is_complete(self) -> bool:
        """Whether all results are there."""
        return len(self._results) == len(self.texts)

    def answer(self) -> object:
        """Return the answer of a complete call."""
        return self._conclude([self._results[i] for i in range(len(self.texts))])


@dataclass(frozen=True, eq=False, slots=True)
class QueuedText:
    """A text, by its place in its call."""

    call: TextCall
    index: int

    @property
    def text(self) -> Text:
        """What is to be read."""
        return self.call.texts[self.index]

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return len(self.text.token_ids)


class TextQueue:
    """Calls with waiting texts; every call leads a pass in turn, whatever the others hold."""

    def __init__(self) -> None:
        """Start empty."""
        self._calls: deque[TextCall] = deque()

    def add(self, call: TextCall) -> None:
        """Queue all texts of a call."""
        self._calls.append(call)

    def drop(self, call: TextCall) -> None:
        """Forget what still waits of a call."""
        if call in self._calls:
            self._calls.remove(call)

    def take(self, max_tokens: int) -> list[QueuedText]:
        """Take the first text of the call whose turn it is, and those most like it in length.

        Args:
            max_tokens: Of a pass with its padding; a longer text goes alone.
        """
        texts = list(islice(self._texts(), LOOKAHEAD))
        taken = [texts[0], *gather(texts[0], texts[1:], max_tokens)]
        self._remove(taken)
        return taken

    def _texts(self) -> Iterator[QueuedText]:
        return (QueuedText(call, index) for call in self._calls for index in call.waiting)

    def _remove(self, taken: Sequence[QueuedText]) -> None:
        for text in taken:
            del text.call.waiting[text.index]
        self._calls.rotate(-1)
        self._calls = deque(call for call in self._calls if call.waiting)


def gather(lead: AnyText, others: Sequence[AnyText], max_tokens: int) -> list[AnyText]:
    """Return which of the others go through a model together with a text: those most like it.

    Args:
        lead: The text that goes in any case.
        others: Those that may.
        max_tokens: Of a pass with its padding.
    """
    lengths = [lead.length]
    company = []
    for text in heapq.nsmallest(MAX_ROWS - 1, others, key=lambda t: abs(t.length - lead.length)):
        if _fits([*lengths, text.length], max_tokens):
            lengths.append(text.length)
            company.append(text)
    return company


def padded(rows: Sequence[Sequence[int]], filler: int = 0) -> mx.array:
    """Return rows as an array [B, T], filled up at their ends."""
    width = max(map(len, rows))
    return mx.array([[*row, *[filler] * (width - len(row))] for row in rows])


def _fits(lengths: Sequence[int], max_tokens: int) -> bool:
    width = max(lengths)
    allowed = max(PADDED_SHARE * width, PADDED_TOKENS)
    return width - min(lengths) <= allowed and width * len(lengths) <= max_tokens
