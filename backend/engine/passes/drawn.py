"""Tokens that are being computed."""

from dataclasses import dataclass

import mlx.core as mx

from backend.core.step import StepLogprobs
from backend.engine.passes.logprobs import LogprobsInFlight


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are being computed.

    Attributes:
        tokens: [B] or [B, W] ids.
        logprobs: Of the rows that request them, by index in the flattened tokens.
        arrays: The arrays to evaluate.
    """

    tokens: mx.array
    logprobs: LogprobsInFlight | None
    arrays: tuple[mx.array, ...]

    def by_row(self, rows: int) -> "Drawn":
        """Return the same with tokens [B, W], for rows with several each."""
        return Drawn(self.tokens.reshape(rows, -1), self.logprobs, self.arrays)

    def read_logprobs(self) -> dict[int, StepLogprobs]:
        """Wait for the log-probabilities and return them by index in the flattened tokens."""
        return self.logprobs.read() if self.logprobs else {}
