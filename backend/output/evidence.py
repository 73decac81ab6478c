"""What tells the format of a model, and the rows of which one fits it."""

import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from backend.output.format import ReasoningFormat, ToolFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FormatEvidence:
    """What tells the format of a model.

    Attributes:
        vocabulary: All tokens, added ones included.
        tool_parser: A name that overrides the evidence.
        reasoning_parser: A name that overrides the evidence.
    """

    vocabulary: Container[str]
    chat_template: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """Texts of which all must be there, or none: in the template, as tokens, or as either."""

    template: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def fits(self, evidence: FormatEvidence) -> bool:
        """Tell whether the evidence holds all of it."""
        template, vocabulary = evidence.chat_template, evidence.vocabulary
        return (
            all(text in template for text in self.template)
            and all(token in vocabulary for token in self.vocabulary)
            and all(text in template or text in vocabulary for text in self.anywhere)
            and not any(text in template for text in self.absent)
        )


def in_template(*texts: str) -> Clue:
    """Return the clue that a template holds texts."""
    return Clue(template=texts)


def as_tokens(*tokens: str) -> Clue:
    """Return the clue that a vocabulary holds tokens."""
    return Clue(vocabulary=tokens)


FormatT = TypeVar("FormatT", ReasoningFormat, ToolFormat)


@dataclass(frozen=True, slots=True)
class FormatRow(Generic[FormatT]):
    """A format, the clues of which one must fit, and the names that others have for it."""

    format: FormatT
    clues: tuple[Clue, ...] = ()
    aliases: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Tell whether a name means this format."""
        normal = name.strip().lower().replace("-", "_")
        return normal in (self.format.name, *self.aliases)

    def fits(self, evidence: FormatEvidence) -> bool:
        """Tell whether a model writes like this."""
        return any(clue.fits(evidence) for clue in self.clues)


def find(
    rows: Sequence[FormatRow[FormatT]], override: str | None, evidence: FormatEvidence
) -> FormatT | None:
    """Return the format of the row that is named, or else of the first that fits."""
    if override is not None:
        if named := [row for row in rows if row.is_called(override)]:
            return named[0].format
        warn_once(f"unknown parser {override!r}: looking at the model's own evidence")
    return next((row.format for row in rows if row.fits(evidence)), None)


@lru_cache
def warn_once(message: str) -> None:
    """Warn, once per message: detection runs for every request."""
    log.warning("%s", message)
