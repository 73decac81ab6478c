"""Evidence of a model's format."""

import re
from collections.abc import Collection
from dataclasses import dataclass

# Appended to the name of a format to override all evidence.
FORCED = "!"


@dataclass(frozen=True, slots=True)
class FormatEvidence:
    """Evidence of a model's format.

    Attributes:
        vocabulary: All tokens, including added ones.
        written_call: The template's rendering of `EXAMPLE_CALL`; empty if unknown.
        is_told_here: Whether it is this backend that tells the model how to call.
        tool_parser: A name to use if the other evidence is inconclusive; with `FORCED` appended, it
            overrides the evidence.
        reasoning_parser: A name that overrides the evidence.
    """

    vocabulary: Collection[str]
    chat_template: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    written_call: str = ""
    is_told_here: bool = False

    def has(self, marker: str) -> bool:
        """Tell whether a marker is in the template, or is a token."""
        return marker in self.chat_template or marker in self.vocabulary

    def find(self, marker: re.Pattern[str]) -> str:
        """Return the group of a marker in the template or in a token; empty if there is none."""
        if found := marker.search(self.chat_template):
            return found[1]
        tokens = (marker.fullmatch(token) for token in self.vocabulary)
        return next((found[1] for found in tokens if found), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """Texts that must be present or absent: in the template, as tokens, or as either."""

    template: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def fits(self, evidence: FormatEvidence) -> bool:
        """Tell whether the evidence matches completely."""
        template, vocabulary = evidence.chat_template, evidence.vocabulary
        return (
            all(text in template for text in self.template)
            and all(token in vocabulary for token in self.vocabulary)
            and all(text in template or text in vocabulary for text in self.anywhere)
            and not any(text in template for text in self.absent)
        )


def in_template(*texts: str) -> Clue:
    """Return the clue that the template contains these texts."""
    return Clue(template=texts)


def as_tokens(*tokens: str) -> Clue:
    """Return the clue that the vocabulary contains these tokens."""
    return Clue(vocabulary=tokens)
