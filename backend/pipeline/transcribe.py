"""The pipeline of AudioTranscription: passage by passage, each a request of its own."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backend.config import MAX_PASSAGE_TOKENS, MAX_TRANSCRIPTIONS
from backend.core.prompt import MediaKind, Medium, Message
from backend.core.request import (
    GenerationCall,
    GenerationParams,
    Remembered,
    SamplingParams,
    new_id,
)
from backend.core.step import ContentDelta
from backend.errors import OverloadedError, UnsupportedError
from backend.media.speech import Passage, passages, read_speech
from backend.pipeline import worker_pool
from backend.pipeline.generate import generate
from backend.pipeline.served_model import ServedEngine, ServedModel, require_decoder

FIELD = "dst"
_WRITE = "Write down exactly the words that are spoken in this recording, and nothing else."
_TRANSLATE = "Translate the speech in this recording into English. Write the translation only."

log = logging.getLogger(__name__)


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


async def transcribe(
    call: TranscriptionCall, model: ServedModel, engine: ServedEngine
) -> AsyncGenerator[str | Transcript, None]:
    """Yield pieces of text as they come, and at last the whole transcript.

    Closing the iterator cancels the work.

    Raises:
        OverloadedError: Too many transcriptions are running.
    """
    started = time.monotonic()
    _require_hearing(model)
    if model.transcriptions.locked():
        most = MAX_TRANSCRIPTIONS
        problem = f"{most} transcriptions are running, at most {most} may: try later"
        raise OverloadedError(problem)
    async with model.transcriptions:
        segments: list[TranscriptSegment] = []
        samples = await worker_pool.run(
            partial(read_speech, FIELD, call.path), size_bytes=0, reads_media=True
        )
        for passage in passages(samples):
            text = ""
            async with aclosing(_words(call, passage, model, engine)) as words:
                async for piece in words:
                    # One space separates two passages.
                    if not text and any(segment.text for segment in segments):
                        yield " "
                    text += piece
                    yield piece
            segments.append(TranscriptSegment(passage.start_s, passage.end_s, text.strip()))
    duration_s = segments[-1].end_s if segments else 0.0
    transcript = Transcript(tuple(segments), call.language, duration_s)
    ms = (time.monotonic() - started) * 1000.0
    text = "transcription seconds=%.1f passages=%d ms=%.0f"
    log.info(text, transcript.duration_s, len(segments), ms)
    yield transcript


def _require_hearing(model: ServedModel) -> None:
    require_decoder("AudioTranscription", model)
    if model.media is None or MediaKind.AUDIO not in model.media.snippets:
        name = model.card.name
        raise UnsupportedError(f"AudioTranscription: {name} takes no audio; load a model that does")


async def _words(
    call: TranscriptionCall, passage: Passage, model: ServedModel, engine: ServedEngine
) -> AsyncGenerator[str, None]:
    """Yield the text of a passage in pieces; the first has no leading space."""
    payload = await worker_pool.run(
        passage.payload, size_bytes=passage.samples.nbytes, reads_media=True
    )
    has_begun = False
    async with aclosing(generate(_request(call, payload), model, engine)) as increments:
        async for increment in increments:
            piece = "".join(d.text for d in increment.deltas if isinstance(d, ContentDelta))
            if piece := piece if has_begun else piece.lstrip():
                has_begun = True
                yield piece


def _request(call: TranscriptionCall, payload: str) -> GenerationCall:
    return GenerationCall(
        params=GenerationParams(
            request_id=new_id(),
            sampling=SamplingParams(temperature=call.temperature),
            max_tokens=MAX_PASSAGE_TOKENS,
            remembered=Remembered.NOTHING,
        ),
        messages=(Message(role="user", content=_instruction(call)),),
        media=(Medium(MediaKind.AUDIO, FIELD, payload),),
        template_options={"enable_thinking": False},
    )


def _instruction(call: TranscriptionCall) -> str:
    parts = [_TRANSLATE if call.is_translated else _WRITE]
    if call.language:
        parts.append(f"The language that is spoken is {call.language}.")
    if call.hint:
        parts.append(f"Words that may occur in it: {call.hint}")
    return " ".join(parts)
