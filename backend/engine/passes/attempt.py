"""A pass over drafted tokens: its inputs, and the accepted ones among them."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from backend.core.step import StepLogprobs, TokenStep
from backend.engine.kv.packed import Column
from backend.engine.passes.drawn import Drawn
from backend.engine.rows.row import Row

Drafts: TypeAlias = Sequence[tuple[int, ...]]
"""The drafted tokens of each row of a batch."""


class RowStep(NamedTuple):
    """A token that landed, and the row it belongs to."""

    row: Row
    step: TokenStep


class Attempt:
    """The inputs of each row: its own tokens that are not in its KV cache, then its draft.

    Attributes:
        inputs: [B] of each row.
        starts: [B] own tokens before the latest.
        column: All inputs, row by row.
        drafts: [B] of each row.
        accepted: [B] accepted tokens of each draft, once known.
        kept: [B] inputs that stay in the KV cache of each row.
    """

    def __init__(self, rows: Sequence[Row], drafts: Drafts, *, keeps_parts: bool) -> None:
        """Assemble the inputs.

        Args:
            rows: All rows of the batch; their tokens have been read.
            drafts: Of each.
            keeps_parts: Whether a row may keep a part of its inputs; otherwise all or none.
        """
        self._rows = rows
        self._keeps_parts = keeps_parts
        self.drafts = drafts
        self.inputs = [
            [*row.token_ids[row.fed :], *draft] for row, draft in zip(rows, drafts, strict=True)
        ]
        self.starts = [row.unfed - 1 for row in rows]
        self.column = Column(list(map(len, self.inputs)))
        self.accepted: list[int] = []
        self.kept: list[int] = []

    def confirmed(self, drawn: Drawn) -> list[RowStep]:
        """Give the rows their own tokens, and return them.

        Args:
            drawn: The token that follows each of the inputs, row by row.
        """
        found: list[int] = drawn.tokens.tolist()
        logprobs = drawn.read_logprobs()
        steps: list[RowStep] = []
        for i, row in enumerate(self._rows):
            latest = self.column.firsts[i] + self.starts[i]
            own = row.confirm(self.drafts[i], found[latest : latest + 1 + len(self.drafts[i])])
            self._keep(row, i, len(own) - 1)
            steps += (taken(row, t, logprobs.get(latest + n)) for n, t in enumerate(own))
        return steps

    def _keep(self, row: Row, i: int, right: int) -> None:
        is_whole = right == len(self.drafts[i])
        kept = self.starts[i] + 1 + right if self._keeps_parts or is_whole else 0
        self.accepted.append(right)
        self.kept.append(kept)
        row.fed += kept


def taken(row: Row, token_id: int, logprobs: StepLogprobs | None) -> RowStep:
    """Give a row its next token; the last one reports its drafts."""
    reason = row.take(token_id)
    row.has_left = reason is not None
    if reason is None:
        return RowStep(row, TokenStep(token_id, None, logprobs))
    return RowStep(row, TokenStep(token_id, reason, logprobs, row.drafted, row.accepted))
