"""A decode loop in virtual time, whose real costs may differ from those measured at load."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_driver import VOCAB, make_request

from backend.config import SpeculationOptions
from backend.engine.drafts.drafting import Drafting
from backend.engine.drafts.pricing import PassCosts
from backend.engine.rows.pacing import Counters
from backend.engine.rows.row import Row


def row_of(prompt, max_tokens=400):
    """Return a row whose prompt and first token have been read."""
    row = Row(make_request(f"r{len(prompt)}", prompt, max_tokens=max_tokens))
    row.take(3)
    row.drawn, row.fed = 1, len(prompt)
    return row


class ScriptedModel:
    """A draft model that writes a given text."""

    nbytes = 0
    most_tokens = 99
    is_at_once = False

    def __init__(self, seconds, text=(7,) * 99):
        self.costs = PassCosts(seconds)
        self.text = text
        self.written = []
        self._read = {}

    def follow(self, rows):
        self._read = {row: count for row, count in self._read.items() if row in rows}

    def see(self, rows, counts, by_row):
        """Do nothing."""

    def unread(self, row):
        return len(row.token_ids) - 1 - self._read.get(row, 0)

    def read(self, row, count):
        self._read[row] = self._read.get(row, 0) + count
        return self.costs.of(1, count)

    def write(self, rows, depth):
        self.written.append((len(rows), depth))
        for row in rows:
            self._read[row] = len(row.token_ids)
        return [list(self.text[:depth]) for _ in rows]


@dataclass
class VirtualDecoding:
    """Rows that decode in virtual time, in the order of steps of a `Batch`.

    Attributes:
        measured: The curve at load.
        true_s: Returns the real seconds of a pass by its rows and width.
        draft_s: Those of a pass of the draft model, if there is one.
        rightness: The share of right tokens in its drafts.
        symbols: The text is drawn from so many tokens: few give matches that are often wrong.
    """

    measured: dict[int, float]
    true_s: Callable[[int, int], float]
    draft_s: Callable[[int, int], float] | None = None
    draft_measured: dict[int, float] | None = None
    rightness: float = 0.0
    symbols: int = VOCAB
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        self.random = random.Random(1)
        self.now = 0.0
        self.plain_s = 0.0
        self.counters = Counters()
        model = VirtualModel(self) if self.draft_s else None
        options = SpeculationOptions(**self.options)
        self.drafting = Drafting(PassCosts(self.measured), self.counters, VOCAB, options, model)
        self.texts = {}

    def run(self, rows: int, tokens: int, prompt: int = 20, limit: int | None = None) -> None:
        """Decode replies of so many tokens, and add their times."""
        batch = [row_of(self._text(prompt), limit or tokens + 1) for _ in range(rows)]
        self.texts = {row: self._text(prompt + tokens + 200) for row in batch}
        self.drafting.follow(batch)
        self.in_flight = False
        drawn = 0
        while drawn < tokens * rows:
            drawn += self._step(batch)
            if batch[0].drawn > tokens:
                break
        self.plain_s += drawn / rows * self.true_s(rows, 1)
        self.drafting.follow([])

    @property
    def gain(self) -> float:
        """How many times faster it is than without drafts."""
        return self.plain_s / self.now

    def coming(self, row: Row, count: int) -> Sequence[int]:
        """Return the tokens that come next."""
        place = len(row.token_ids)
        return self.texts[row][place : place + count]

    def _text(self, length):
        return [self.random.randrange(self.symbols) + 10 for _ in range(length)]

    def _step(self, rows) -> int:
        started, landed = self.now, 0
        waits, wants = self.in_flight, self.drafting.may_draft
        if waits and wants:
            landed += self._land(rows)
        drafts = () if self.in_flight else self.drafting.drafts()
        if any(drafts):
            landed += self._verify(rows, drafts)
        else:
            landed += self._land(rows) if self.in_flight else 0
            for row in rows:
                row.drawn += 1
                row.fed += 1
            self.in_flight = True
        if waits and not wants:
            self.drafting.observe(len(rows), len(rows), self.now - started)
        else:
            self.drafting.settle(self.now - started, waits + any(drafts))
        return landed

    def _land(self, rows) -> int:
        self.spend(self.true_s(len(rows), 1))
        self.in_flight = False
        for row in rows:
            row.token_ids.append(self.coming(row, 1)[0])
        return len(rows)

    def _verify(self, rows, drafts) -> int:
        width = 1 + max(map(len, drafts))
        before = self.now
        self.spend(self.true_s(len(rows), width))
        accepted = []
        for row, draft in zip(rows, drafts, strict=True):
            coming = self.coming(row, len(draft) + 1)
            pairs = enumerate(zip(draft, coming, strict=False))
            right = next((n for n, (a, b) in pairs if a != b), len(draft))
            row.token_ids += coming[: right + 1]
            row.drawn += right + 1
            row.fed += right + 1
            accepted.append(right)
        self.drafting.learn(accepted)
        self.drafting.observe(len(rows), len(rows) * width, self.now - before)
        return sum(accepted) + len(rows)

    def spend(self, seconds):
        """Let time go by."""
        self.now += seconds


class VirtualModel(ScriptedModel):
    """A draft model that takes virtual time, and is right as often as was said."""

    def __init__(self, decoding):
        super().__init__(decoding.draft_measured or {1: decoding.draft_s(1, 1)})
        self._decoding = decoding

    def read(self, row, count):
        super().read(row, count)
        return self._spend(1, count, 1)

    def write(self, rows, depth):
        super().write(rows, depth)
        self._spend(len(rows), 1, depth)
        return [self._draft(row, depth) for row in rows]

    def _draft(self, row, depth):
        decoding = self._decoding
        wrong = VOCAB - 1
        return [
            token if decoding.random.random() < decoding.rightness else wrong
            for token in decoding.coming(row, depth)
        ]

    def _spend(self, rows, width, times):
        seconds = self._decoding.draft_s(rows, width)
        self._decoding.spend(times * seconds)
        self.costs.observe(rows, rows * width, seconds)
        return times * seconds
