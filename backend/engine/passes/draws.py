"""From logits to tokens, for all rows of a batch: penalties, grammars, draws, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.core.step import StepLogprobs
from backend.engine.passes.logprobs import LogprobsInFlight, logprobs_in_flight
from backend.engine.rows.row import Row
from backend.sampling.masks import TokenMasks
from backend.sampling.processors import History, LogitsAdjuster
from backend.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are being computed.

    Attributes:
        tokens: [B] or [B, W] ids.
        logprobs: Of the rows that asked, by index in the flattened tokens.
        arrays: All that has to be evaluated.
    """

    tokens: mx.array
    logprobs: LogprobsInFlight | None
    arrays: tuple[mx.array, ...]

    def by_row(self, rows: int) -> "Drawn":
        """Return the same with the tokens [B, W] of rows that have several each."""
        return Drawn(self.tokens.reshape(rows, -1), self.logprobs, self.arrays)

    def read_logprobs(self) -> dict[int, StepLogprobs]:
        """Wait for the log-probabilities and return them by index in the flattened tokens."""
        return self.logprobs.read() if self.logprobs else {}


class Draws:
    """The chain of each row of a batch; made anew whenever the rows change."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        """Take rows, whose tokens have all been read but for one in flight at most."""
        self._rows = rows
        self._params = [row.request.sampling for row in rows]
        self._wanted = [row.request.top_logprobs for row in rows]
        self._matchers = [row.matcher for row in rows]
        self._vocab_size = vocab_size
        self._masks = TokenMasks(self._matchers, vocab_size)
        histories = [History(row.request.sampling, row.token_ids, row.fed) for row in rows]
        self._adjuster = LogitsAdjuster(histories, vocab_size)
        self._samplers: dict[int, Sampler] = {}

    @property
    def has_grammars(self) -> bool:
        """Whether a row follows a grammar."""
        return bool(self._masks)

    def draw(self, logits: mx.array, inputs: mx.array) -> Drawn:
        """Draw the next token of each row.

        Args:
            logits: [B, V] float32.
            inputs: [B] ids that they follow, perhaps still on the device.
        """
        adjusted = self._masks.apply(self._adjuster.adjust(logits, inputs))
        tokens = self._sampler(1).draw(adjusted, [row.drawn for row in self._rows])
        return self._drawn(logits, tokens, self._wanted)

    def verify(
        self, logits: mx.array, inputs: Sequence[Sequence[int]], drafts: Sequence[tuple[int, ...]]
    ) -> Drawn:
        """Draw a token at every position of a pass, each as if the drafts before it were right.

        Args:
            logits: [B, W, V] float32.
            inputs: [B][W] ids: the latest token of each row, its drafts, and padding.
            drafts: Of each row.
        """
        rows, width, _ = logits.shape
        adjusted = self._adjuster.adjust_all(logits, inputs).flatten(0, 1)
        adjusted = self._masks.apply_all(adjusted, drafts, width)
        positions = [row.drawn + place for row in self._rows for place in range(width)]
        tokens = self._sampler(width).draw(adjusted, positions)
        wanted = [count for count in self._wanted for _ in range(width)]
        return self._drawn(logits.flatten(0, 1), tokens, wanted).by_row(rows)

    def keep(self, counts: Sequence[int]) -> None:
        """Count for the penalties of each row so many of the inputs of the latest `verify`."""
        self._adjuster.keep(counts)

    def _sampler(self, width: int) -> Sampler:
        if width not in self._samplers:
            params = [params for params in self._params for _ in range(width)]
            self._samplers[width] = Sampler(params, self._vocab_size)
        return self._samplers[width]

    def _drawn(self, logits: mx.array, tokens: mx.array, wanted: Sequence[int | None]) -> Drawn:
        logprobs = logprobs_in_flight(logits, tokens, wanted)
        counts = () if self._adjuster.counts is None else (self._adjuster.counts,)
        return Drawn(tokens, logprobs, (tokens, *counts, *(logprobs.arrays if logprobs else ())))
