"""The draft model as the drafting policy sees it, and the cost of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from backend.engine.drafts.costs import PassCosts
from backend.engine.rows.row import Row

if TYPE_CHECKING:
    import mlx.core as mx

ByRow: TypeAlias = "Callable[[mx.array], mx.array]"

# A row with at most this many unread tokens is read in the pass that drafts for it.
_READ_ALONG_TOKENS = 16
_LEAST_CHUNK_TOKENS, _CHUNK_TOKENS = 32, 512


class DraftModel(Protocol):
    """A smaller model that reads rows of a batch and writes their drafts.

    It may forget a row at any time, which costs only time.

    Attributes:
        costs: The seconds of its passes.
    """

    costs: PassCosts

    @property
    def nbytes(self) -> int:
        """Size of its caches."""

    def follow(self, rows: Sequence[Row]) -> None:
        """Forget all other rows."""

    def see(self, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow) -> None:
        """Handle a pass of the model.

        Args:
            rows: Those of the pass.
            counts: The number of its tokens that each row keeps.
            by_row: Returns an output of a module in the pass as [B, T, n].
        """

    def unread(self, row: Row) -> int:
        """Return the number of unread tokens of a row, not counting the latest."""

    def read(self, row: Row, count: int) -> float:
        """Read the next `count` tokens of a row, at most the unread ones; return the seconds."""

    def write(self, rows: Sequence[Row], depth: int) -> Sequence[Sequence[int]]:
        """Return `depth` tokens of its own vocabulary that may follow each row."""


class ModelSource:
    """The drafts of a draft model, with their price in seconds."""

    def __init__(self, model: DraftModel) -> None:
        """Wrap a model that has read nothing."""
        self.model = model

    def is_ready(self, row: Row) -> bool:
        """Tell whether a row has been read almost to its end."""
        return self.model.unread(row) <= _READ_ALONG_TOKENS

    def writing_s(self, rows: Sequence[Row]) -> tuple[float, float]:
        """Return the seconds of the first drafted token of each row, and of each later one."""
        costs, unread = self.model.costs, max(map(self.model.unread, rows))
        width = 1 + min(unread, _READ_ALONG_TOKENS)
        return costs.of(len(rows), len(rows) * width), costs.of(len(rows), len(rows))

    def reading_s(self, row: Row) -> float:
        """Return the seconds to read a row up to its end."""
        chunks, rest = divmod(self.model.unread(row), _CHUNK_TOKENS)
        costs = self.model.costs
        return chunks * costs.of(1, _CHUNK_TOKENS) + (costs.of(1, rest) if rest else 0.0)

    def read_on(self, row: Row, limit_s: float) -> float:
        """Read a part of a row in about `limit_s` seconds; return the real seconds."""
        costs, unread = self.model.costs, self.model.unread(row)
        count = _LEAST_CHUNK_TOKENS
        while count < _CHUNK_TOKENS and costs.of(1, 2 * count) <= limit_s:
            count *= 2
        return self.model.read(row, min(count, unread))

    def write(self, rows: Sequence[Row], depth: int) -> Mapping[Row, Sequence[int]]:
        """Return `depth` tokens that may follow each row."""
        return dict(zip(rows, self.model.write(rows, depth), strict=True))
