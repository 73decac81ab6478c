"""Images, sounds and videos as they arrive in a request: text, not yet decoded."""

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from backend.config import MAX_AUDIO_BYTES, MAX_IMAGE_BYTES, MAX_VIDEO_BYTES

# Marks the position of a medium in text that the host composed.
MEDIA_MARKER = "<__media__>"


class MediaKind(Enum):
    """The kind of a medium."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"

    @property
    def max_bytes(self) -> int:
        """Size limit of a file of this kind."""
        match self:
            case MediaKind.IMAGE:
                return MAX_IMAGE_BYTES
            case MediaKind.AUDIO:
                return MAX_AUDIO_BYTES
            case MediaKind.VIDEO:
                return MAX_VIDEO_BYTES
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class Medium:
    """One image, sound or video of a request.

    Attributes:
        field: The request field it came from, for error messages: `Images[0]`.
        payload: Base64 or a data URI, as received.
    """

    kind: MediaKind
    field: str
    payload: str = dataclasses.field(repr=False)
