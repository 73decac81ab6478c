"""Tokens that are being computed."""

from dataclasses import dataclass

import mlx.core as mx

from backend.core.step import StepLogprobs
from backend.engine.passes.logprobs import LogprobsInFlight


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are being computed.

    Attributes:
        tokens: [N] ids.
        logprobs: Of the tokens whose requests want them, by index.
        arrays: The arrays to evaluate.
    """

    tokens: mx.array
    logprobs: LogprobsInFlight | None
    arrays: tuple[mx.array, ...]

    def read_logprobs(self) -> dict[int, StepLogprobs]:
        """Wait for the log-probabilities and return them by index."""
        return self.logprobs.read() if self.logprobs else {}
