"""Speech to text: the call and its transcript."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionCall:
    """A recording of speech, and how to transcribe it.

    Attributes:
        language: Language of the speech; empty to detect it.
        is_translated: Whether to write English regardless of the language spoken.
        hint: Words that help recognition, such as names; empty for none.
        temperature: 0 means greedy.
    """

    path: Path
    language: str = ""
    is_translated: bool = False
    hint: str = ""
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A part of a transcript; times are in seconds from the start of the recording."""

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
