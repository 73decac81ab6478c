"""The finding of a check."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The result of a check."""

    GOOD = "good"
    # The backend works, but slower or with something missing.
    WARNING = "warning"
    # The backend does not work.
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: The thing that was checked.
        text: The result.
        remedy: A command, or a step, that fixes it; empty if nothing is wrong.
    """

    verdict: Verdict
    subject: str
    text: str
    remedy: str = ""


def good(subject: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Verdict.GOOD, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding of a minor problem."""
    return Finding(Verdict.WARNING, subject, text, remedy)


def bad(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding of a problem that keeps the backend from working."""
    return Finding(Verdict.BAD, subject, text, remedy)
