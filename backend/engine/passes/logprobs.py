"""Logits to log-probabilities for rows that request them, as plain floats."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.core.step import StepLogprobs
from backend.model.device import DEVICE
from backend.sampling.largest import largest


@dataclass(frozen=True, slots=True)
class LogprobsInFlight:
    """Log-probabilities being computed.

    Attributes:
        rows: Index in the batch, and number of alternatives, of each row that requests them.
        chosen: [R, 1] of the drawn token.
        top_ids: [R, K] likeliest ids, the likeliest first; K is the largest requested number.
        top: [R, K] their log-probabilities.
    """

    rows: tuple[tuple[int, int], ...]
    chosen: mx.array
    top_ids: mx.array
    top: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays to evaluate."""
        return self.chosen, self.top_ids, self.top

    def read(self) -> dict[int, StepLogprobs]:
        """Wait for the values and return them by index in the batch, likeliest first."""
        values = zip(
            self.rows, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True
        )
        return {
            row: StepLogprobs(logprob=chosen, top=tuple(zip(ids[:count], top[:count], strict=True)))
            for (row, count), (chosen,), ids, top in values
        }


def logprobs_in_flight(
    logits: mx.array, tokens: mx.array, wanted: Sequence[int | None]
) -> LogprobsInFlight | None:
    """Start computing log-probabilities of the model's own distribution.

    Args:
        logits: [B, V] float32, before penalties, masks and temperature.
        tokens: [B] drawn ids.
        wanted: Alternatives per row; `None` is a row without.
    """
    rows = tuple((i, count) for i, count in enumerate(wanted) if count is not None)
    if not rows:
        return None
    if len(rows) < len(wanted):
        index = mx.array([i for i, _ in rows])
        logits, tokens = logits[index], tokens[index]
    total = DEVICE.log_sum_exp(logits)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)
    count = min(max(max(n for _, n in rows), 1), logits.shape[-1])
    ids, top = largest(logits, count)
    return LogprobsInFlight(rows, chosen - total, ids, top - total)
