"""Speech as text: the call, and the transcript that answers it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionCall:
    """A file of speech, and how to write it down.

    Attributes:
        language: Of the speech; empty when the model is to find out.
        is_translated: Whether to write English, whatever is spoken.
        hint: Words that help, such as names; empty for none.
        temperature: 0 is greedy.
    """

    path: Path
    language: str = ""
    is_translated: bool = False
    hint: str = ""
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A part of a transcript; times in seconds from the beginning."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole transcript."""

    segments: tuple[TranscriptSegment, ...]
    language: str
    duration_s: float

    @property
    def text(self) -> str:
        """The text of all segments."""
        return " ".join(segment.text for segment in self.segments if segment.text)
