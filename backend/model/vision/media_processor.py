"""Media to tokens and arrays, by the processor of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, assert_never

from backend.core.media import MediaKind
from backend.model.text.snippets import Snippets
from backend.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

# What upstream's processors raise: anything that arrays of a wrong shape can lead to.
PROCESSOR_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)

DEFAULT_FPS = 2.0

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
_NOTHING = "gives the model nothing of it but tokens"
_NAMED = ("bos_token", "eos_token", "pad_token")
# In the place of an id that only the network knows, and that is below 0 in all that have one.
_NO_TOKEN = -1
_TOKEN_INPUTS = ("input_ids", *_PER_TOKEN)

# What upstream's processors return.
Untyped: TypeAlias = Any
# A processor of transformers or of mlx-vlm, which are untyped.
HfProcessor: TypeAlias = Any


class ProcessorError(Exception):
    """A processor cannot take a medium; the message is its own."""


@dataclass(frozen=True, slots=True)
class Film:
    """Frames, RGB, [T, H, W, 3], and how many of them make a second."""

    frames: np.ndarray = field(repr=False)
    fps: float


Content: TypeAlias = Any
"""A PIL image in RGB, samples [N] at the processor's rate, or a `Film`."""


def film(images: Sequence[Any], *, duration_s: float) -> Film:
    """Make one of PIL images of one size, the last of which is shown after `duration_s`."""
    import numpy as np

    is_timed = duration_s > 0 and len(images) > 1
    fps = (len(images) - 1) / duration_s if is_timed else DEFAULT_FPS
    return Film(np.stack([np.asarray(image) for image in images]), fps)


def raw(kind: MediaKind, content: Content) -> tuple[np.ndarray, float]:
    """Return a medium as an array, and how many frames of it make a second."""
    import numpy as np

    if kind is MediaKind.VIDEO:
        return content.frames, content.fps
    return np.asarray(content), DEFAULT_FPS


def content_of(kind: MediaKind, array: np.ndarray, fps: float) -> Content:
    """Return the medium of an array; the reverse of `raw`."""
    match kind:
        case MediaKind.IMAGE:
            from PIL import Image

            return Image.fromarray(array)
        case MediaKind.AUDIO:
            return array
        case MediaKind.VIDEO:
            return Film(array, fps)
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True)
class PreparedMedium:
    """A medium as a prompt takes it in.

    Attributes:
        kind: What it is.
        digest: Identifies what it shows.
        text: Stands for it in the prompt's text.
        token_ids: The tokens of that text which the tower's output replaces, and their brackets.
        inputs: What the tower reads, by the names of mlx-vlm.
        marks: The special tokens among these, as texts.
    """

    kind: MediaKind
    digest: bytes
    text: str
    token_ids: tuple[int, ...]
    inputs: Mapping[str, Any] = field(repr=False)
    marks: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.inputs.values())


class MediaPreparer(Protocol):
    """Prepares media for a model; safe from any thread.

    Attributes:
        snippets: What stands in a text for a medium of each kind that the model takes.
        takes_parts: Whether the template writes them; else they are put into its messages.
        sampling_rate: Of the sounds that it takes, in Hz.
    """

    snippets: Mapping[MediaKind, str]
    takes_parts: bool
    sampling_rate: int

    def prepare(self, kind: MediaKind, content: Content, digest: bytes) -> PreparedMedium:
        """Return a medium's text, tokens and arrays.

        Raises:
            ProcessorError: The processor refuses it.
        """


class MediaProcessor:
    """A checkpoint's processor behind a lock; safe from any thread.

    Attributes:
        snippets: What stands in a text for a medium of each kind that the model takes.
        takes_parts: Whether the template writes them; else they are put into its messages.
        takes_sounds: Whether it takes more than one of them in a prompt.
        sampling_rate: Of the sounds that it takes, in Hz.
    """

    def __init__(self, processor: HfProcessor, tokenizer: Tokenizer, snippets: Snippets) -> None:
        """Wrap a processor.

        Args:
            processor: Used by nobody else from here on.
            tokenizer: The model's.
            snippets: What the model's template writes.
        """
        self._processor = processor
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.snippets = snippets.texts
        self.takes_parts = snippets.takes_parts
        extractor = getattr(processor, "feature_extractor", None)
        self.takes_sounds: bool = getattr(processor, "supports_multiple_audio", False)
        self.sampling_rate: int = getattr(extractor, "sampling_rate", 16_000)

    def without(self, kinds: Container[MediaKind]) -> MediaProcessor | None:
        """Return one for the other kinds only; `None` when there are none."""
        left = {kind: text for kind, text in self.snippets.items() if kind not in kinds}
        if not left:
            return None
        chosen = Snippets(left, takes_parts=self.takes_parts)
        return MediaProcessor(self._processor, self._tokenizer, chosen)

    def prepare(self, kind: MediaKind, content: Content, digest: bytes) -> PreparedMedium:
        """Return a medium's text, tokens and arrays.

        Args:
            kind: One that has a snippet.
            content: The medium.
            digest: Identifies it.

        Raises:
            ProcessorError: The processor refuses it.
        """
        with self._lock, self._failures_told():
            inputs = self._process(kind, content)
        return self._described(kind, digest, inputs)

    def prepare_whole(
        self, kind: MediaKind, contents: Sequence[Content], text: str
    ) -> dict[str, np.ndarray]:
        """Return the tokens (`input_ids`, [1, T]) and arrays that upstream makes of a whole prompt.

        Args:
            kind: Of all media.
            contents: The media.
            text: Holds a snippet for each of them.

        Raises:
            ProcessorError: The processor refuses it.
        """
        with self._lock, self._failures_told():
            return _read(self._processor, text, _arguments(kind, contents))

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except PROCESSOR_FAILURES as error:
            raise ProcessorError(self._told(error)) from error

    def _told(self, error: Exception) -> str:
        """Return what a processor says, or which of the values that it may want are missing."""
        told = " ".join(str(error).split())
        if "NoneType" not in told:
            return told
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        missing = [name for name in _NAMED if getattr(tokenizer, name, None) is None]
        if not missing:
            return f"needs a setting that the checkpoint's files do not have ({told})"
        named = " and no ".join(missing)
        return f"needs a token that tokenizer_config.json does not name: there is no {named}"

    def _process(self, kind: MediaKind, content: Content) -> dict[str, np.ndarray]:
        """Run the processor over one medium, as if it were all of a prompt."""
        if kind is MediaKind.AUDIO:
            self._require_heard(len(content) / self.sampling_rate)
        inputs = _read(self._processor, self.snippets[kind], _arguments(kind, [content]))
        if all(name in _TOKEN_INPUTS or array.size == 0 for name, array in inputs.items()):
            reason = "is too short for it to read anything" if kind is MediaKind.AUDIO else _NOTHING
            raise ProcessorError(reason)
        return inputs

    def _require_heard(self, seconds: float) -> None:
        """Refuse a sound whose end the processor would leave out."""
        tokens = getattr(self._processor, "audio_seq_length", None)
        ms_per_token = getattr(self._processor, "audio_ms_per_token", None)
        if tokens and ms_per_token and seconds * 1000 > tokens * ms_per_token:
            heard = f"{tokens * ms_per_token / 1000:g} s at most are heard"
            raise ProcessorError(f"is {seconds:.1f} s long, {heard}")

    def _described(
        self, kind: MediaKind, digest: bytes, inputs: dict[str, np.ndarray]
    ) -> PreparedMedium:
        ids: list[int] = inputs.pop("input_ids").reshape(-1).tolist()
        if min(ids, default=0) < 0:
            raise ProcessorError("what stands for it is no token")
        start, stop = self._core(ids)
        for name in _PER_TOKEN:
            if name in inputs:
                inputs[name] = inputs[name][:, start:stop]
        text = self._tokenizer.decode(ids)
        if self._tokenizer.encode(text, adds_special=False) != ids:
            raise ProcessorError("the text of its tokens does not give these tokens again")
        core = tuple(ids[start:stop])
        special = self._tokenizer.special_texts
        marks = frozenset(special[token_id] for token_id in core if token_id in special)
        return PreparedMedium(kind, digest, text, core, inputs, marks)

    def _core(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return where the special tokens begin and end: they never merge with text beside them."""
        special = [index for index, token_id in enumerate(ids) if token_id in self._marks]
        if not special:
            raise ProcessorError("no special token stands for it")
        return special[0], special[-1] + 1

    @property
    def _marks(self) -> Mapping[int, str]:
        return self._tokenizer.added_texts


def _read(processor: HfProcessor, text: str, media: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return all that a processor makes of a prompt and has something in it."""
    from mlx_vlm.utils import prepare_inputs

    inputs = prepare_inputs(processor, prompts=text, image_token_index=_NO_TOKEN, **media)
    inputs.pop("attention_mask", None)
    # Upstream makes arrays of MLX, whatever it is asked for: they end in this thread.
    arrays = {name: _as_numpy(value) for name, value in inputs.items() if value is not None}
    return {name: array for name, array in arrays.items() if len(array)}


def _as_numpy(value: Untyped) -> Untyped:
    """Return an array, or a list of them where their shapes differ."""
    import mlx.core as mx
    import numpy as np

    # NumPy has no such numbers.
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        value = value.astype(mx.float32)
    try:
        return np.atleast_1d(np.array(value))
    except ValueError:
        return [_as_numpy(each) for each in value]


def _arguments(kind: MediaKind, contents: Sequence[Content]) -> dict[str, Any]:
    """Return media by the names of mlx-vlm's `prepare_inputs`."""
    match kind:
        case MediaKind.IMAGE:
            return {"images": list(contents)}
        case MediaKind.AUDIO:
            return {"audio": list(contents)}
        case MediaKind.VIDEO:
            frames = [content.frames for content in contents]
            return {"videos": frames, "video_metadata": [_shown(content) for content in contents]}
        case _:
            assert_never(kind)


def _shown(video: Film) -> dict[str, Any]:
    count = len(video.frames)
    return {"total_num_frames": count, "fps": video.fps, "frames_indices": list(range(count))}
