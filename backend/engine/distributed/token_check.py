"""Checks that all ranks have drawn the same tokens: otherwise their caches differ."""

from collections.abc import Mapping

from backend.core.status import EngineStatus
from backend.engine.distributed.messages import Report
from backend.errors import GroupLostError


class TokenCheck:
    """The checksums of rank 0, until every other rank has confirmed them.

    Attributes:
        statuses: The latest status of every other rank.
    """

    def __init__(self, reports: Mapping[int, Report]) -> None:
        """Start with a report of every other rank."""
        self.statuses: dict[int, EngineStatus] = {}
        self._turns = dict.fromkeys(reports, 0)
        self._checksums: dict[int, int] = {}
        for rank, report in reports.items():
            self._turns[rank] = report.turn
            self.statuses[rank] = report.status

    def note(self, turn: int, checksum: int) -> None:
        """Record the checksum of rank 0 at the end of a turn."""
        self._checksums[turn] = checksum

    def compare(self, rank: int, report: Report) -> None:
        """Compare another rank's checksum at the end of a recorded turn.

        Raises:
            GroupLostError: They differ.
        """
        if report.checksum != self._checksums[report.turn]:
            raise GroupLostError(
                f"rank {rank} has drawn other tokens than rank 0 by turn {report.turn}: are the "
                "machines, their packages and the model's files alike?"
            )
        self.statuses[rank] = report.status
        self._turns[rank] = report.turn
        oldest = min(self._turns.values())
        self._checksums = {n: value for n, value in self._checksums.items() if n > oldest}
