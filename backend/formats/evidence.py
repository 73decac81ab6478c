"""Evidence of the format in which a model writes."""

from collections.abc import Container
from dataclasses import dataclass

# After the name of a format that counts whatever the evidence is.
FORCED = "!"


@dataclass(frozen=True, slots=True)
class FormatEvidence:
    """Evidence of the format in which a model writes.

    Attributes:
        vocabulary: All tokens, added ones included.
        written_call: The reply that the template writes for `EXAMPLE_CALL`; empty if unknown.
        tool_parser: A name that counts where the rest tells nothing; with `FORCED` after it,
            whatever the rest tells.
        reasoning_parser: A name that overrides the evidence.
    """

    vocabulary: Container[str]
    chat_template: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    written_call: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """Texts that must all be there, or be absent: in the template, as tokens, or as either."""

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
