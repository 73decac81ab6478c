"""Images, sounds and videos: as they arrive in a request, and prepared for a prompt."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never

from msgspec import Struct

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


class PreparedMedium(Struct, frozen=True, tag=True, array_like=True):
    """A medium in the form that prompts need; crosses the processes as it is.

    Attributes:
        digest: Identifies its content.
        text: Represents it in the prompt's text.
        token_ids: Tokens of that text that the tower's output replaces, with their brackets.
        inputs: Arrays for the tower, by mlx-vlm's names; `input_ids` [1, T] among them if
            mlx-vlm has other tokens for the medium.
        marks: Special tokens among the ids, as texts.
        lead: Text of the BOS token that the processor writes before every prompt with media.
        rules: Patterns in a prompt with media that the processor replaces; see `Join`.
    """

    kind: MediaKind
    digest: bytes
    text: str
    token_ids: tuple[int, ...]
    inputs: Mapping[str, Any]
    marks: frozenset[str] = frozenset()
    lead: str = ""
    rules: tuple[tuple[str, str], ...] = ()

    @property
    def upstream_ids(self) -> Sequence[int]:
        """The tokens that mlx-vlm has for the medium, `NO_TOKEN` for each that is none."""
        if (found := self.inputs.get("input_ids")) is None:
            return self.token_ids
        ids: list[int] = found.reshape(-1).tolist()
        return ids

    @property
    def nbytes(self) -> int:
        """Size of the arrays, in bytes."""
        return sum(map(_size_bytes, self.inputs.values()))

    def __repr__(self) -> str:
        """Leave the arrays out."""
        return f"PreparedMedium({self.kind}, {self.text!r}, {len(self.token_ids)} tokens)"


def _size_bytes(value: Any) -> int:  # noqa: ANN401 (an array, or a list of them)
    return sum(map(_size_bytes, value)) if isinstance(value, list) else int(value.nbytes)
