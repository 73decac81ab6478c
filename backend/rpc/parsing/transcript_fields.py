"""`pb.TranscriptRequest` -> a call, and a transcript -> `pb.TranscriptResult`."""

import math
from pathlib import Path

from backend.config import MAX_HINT_CHARS, MAX_LANGUAGE_CHARS
from backend.core.transcription import Transcript, TranscriptionCall
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.limits import require_path, require_printable

_NANOSECONDS = 1_000_000_000


def transcription_call(request: pb.TranscriptRequest) -> TranscriptionCall:
    """Return the call of a request. Speakers and word times are not detected.

    Raises:
        InvalidRequestError: A field is malformed, out of range or missing.
    """
    if not request.dst.strip():
        raise InvalidRequestError("dst", "is empty")
    if not 0.0 <= request.temperature < math.inf:
        raise InvalidRequestError("temperature", f"must be at least 0, not {request.temperature:g}")
    hint = request.prompt.strip()
    if len(hint) > MAX_HINT_CHARS:
        problem = f"has {len(hint)} characters, at most {MAX_HINT_CHARS} are allowed"
        raise InvalidRequestError("prompt", problem)
    return TranscriptionCall(
        path=Path(require_path("dst", request.dst)),
        language=require_printable("language", request.language, MAX_LANGUAGE_CHARS),
        is_translated=request.translate,
        hint=hint,
        temperature=request.temperature,
    )


def transcript_result(transcript: Transcript) -> pb.TranscriptResult:
    """Return the answer."""
    return pb.TranscriptResult(
        segments=[
            pb.TranscriptSegment(
                id=number,
                start=round(segment.start_s * _NANOSECONDS),
                end=round(segment.end_s * _NANOSECONDS),
                text=segment.text,
            )
            for number, segment in enumerate(transcript.segments)
        ],
        text=transcript.text,
        language=transcript.language,
        duration=transcript.duration_s,
    )
