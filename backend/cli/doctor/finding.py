"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a thing is."""

    GOOD = "good"
    # The backend works without it, or slower.
    WARNING = "warning"
    # The backend does not work.
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: What was looked at.
        text: What was found.
        remedy: A command, or a step, that mends it; empty where nothing is to be mended.
    """

    verdict: Verdict
    subject: str
    text: str
    remedy: str = ""


def good(subject: str, text: str) -> Finding:
    """Return a finding of something that is well."""
    return Finding(Verdict.GOOD, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that could be better."""
    return Finding(Verdict.WARNING, subject, text, remedy)


def bad(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that keeps the backend from its work."""
    return Finding(Verdict.BAD, subject, text, remedy)
