"""A draft model as the policy of drafts knows it, and what its drafts cost."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from backend.engine.drafts.costs import PassCosts
from backend.engine.rows.row import Row

# A row that lacks no more is read on in the pass that drafts for it.
_READ_ALONG_TOKENS = 16
_LEAST_CHUNK_TOKENS, _CHUNK_TOKENS = 32, 512


class DraftModel(Protocol):
    """A smaller model that reads rows of a batch and writes their drafts.

    What it has read of a row may be lost at any time: that costs time and nothing else.

    Attributes:
        costs: What its passes take.
    """

    costs: PassCosts

    @property
    def nbytes(self) -> int:
        """Size of its caches."""

    def follow(self, rows: Sequence[Row]) -> None:
        """Forget all other rows."""

    def see(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Take notice of a pass of the model, of which each row keeps `count` tokens."""

    def unread(self, row: Row) -> int:
        """Return how many tokens of a row it lacks, but for the latest."""

    def read(self, row: Row, count: int) -> None:
        """Read the next `count` tokens of a row, at most those it lacks; computed on return."""

    def write(self, rows: Sequence[Row], depth: int) -> Sequence[Sequence[int]]:
        """Return `depth` tokens of its own vocabulary that may come next in each row."""


class ModelSource:
    """The drafts of a draft model, with their price in seconds."""

    def __init__(self, model: DraftModel) -> None:
        """Take a model that has read nothing."""
        self.model = model

    def is_ready(self, row: Row) -> bool:
        """Tell whether a row has been read nearly to its end."""
        return self.model.unread(row) <= _READ_ALONG_TOKENS

    def writing_s(self, rows: Sequence[Row]) -> tuple[float, float]:
        """Return what the first token of drafts for rows takes, and each one after it."""
        costs, unread = self.model.costs, max(map(self.model.unread, rows))
        width = 1 + min(unread, _READ_ALONG_TOKENS)
        return costs.of(len(rows), width), costs.of(len(rows), 1)

    def reading_s(self, row: Row) -> float:
        """Return what it takes to read a row up to its end."""
        chunks, rest = divmod(self.model.unread(row), _CHUNK_TOKENS)
        costs = self.model.costs
        return chunks * costs.of(1, _CHUNK_TOKENS) + (costs.of(1, rest) if rest else 0.0)

    def read_on(self, row: Row, limit_s: float) -> float:
        """Read a part of a row that takes about so long; return what it should have taken."""
        costs, unread = self.model.costs, self.model.unread(row)
        count = _LEAST_CHUNK_TOKENS
        while count < _CHUNK_TOKENS and costs.of(1, 2 * count) <= limit_s:
            count *= 2
        count = min(count, unread)
        expected_s = costs.of(1, count)
        self.model.read(row, count)
        return expected_s

    def write(self, rows: Sequence[Row], depth: int) -> Mapping[Row, Sequence[int]]:
        """Return `depth` tokens that may come next in each row."""
        return dict(zip(rows, self.model.write(rows, depth), strict=True))
