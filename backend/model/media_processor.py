"""Media to tokens and arrays, by the processor of a checkpoint."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from backend.config import PREPARED_MEDIA_BYTES
from backend.core.media import MediaKind
from backend.model.snippets import Snippets
from backend.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

# What upstream's processors raise: anything that arrays of a wrong shape can lead to.
PROCESSOR_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)

DEFAULT_FPS = 2.0

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")

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


class MediaProcessor:
    """A checkpoint's processor behind a lock, with a memory; safe from any thread.

    Attributes:
        snippets: What stands in a text for a medium of each kind that the model takes.
        takes_parts: Whether the template writes them; else they are put into its messages.
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
        self._prepared: OrderedDict[bytes, PreparedMedium] = OrderedDict()
        self._prepared_bytes = 0
        self.snippets = snippets.texts
        self.takes_parts = snippets.takes_parts
        extractor = getattr(processor, "feature_extractor", None)
        self.sampling_rate: int = getattr(extractor, "sampling_rate", 16_000)

    def limited_to(self, snippets: Mapping[MediaKind, str]) -> MediaProcessor:
        """Return one for some kinds only."""
        chosen = Snippets(snippets, takes_parts=self.takes_parts)
        return MediaProcessor(self._processor, self._tokenizer, chosen)

    def prepare(self, kind: MediaKind, content: Content, digest: bytes) -> PreparedMedium:
        """Return a medium's text, tokens and arrays.

        Args:
            kind: One that has a snippet.
            content: The medium.
            digest: Identifies it: the same one is not prepared again.

        Raises:
            ProcessorError: The processor refuses it.
        """
        with self._lock:
            known = self._prepared.get(digest)
            if known is not None:
                self._prepared.move_to_end(digest)
                return known
            try:
                inputs = self._process(kind, content)
            except PROCESSOR_FAILURES as error:
                raise ProcessorError(" ".join(str(error).split())) from error
        prepared = self._described(kind, digest, inputs)
        with self._lock:
            self._remember(prepared)
        return prepared

    def _process(self, kind: MediaKind, content: Content) -> dict[str, np.ndarray]:
        """Run the processor over one medium, as if it were all of a prompt."""
        import numpy as np
        from mlx_vlm.utils import prepare_inputs

        if kind is MediaKind.AUDIO:
            self._require_heard(len(content) / self.sampling_rate)
        inputs = prepare_inputs(
            self._processor, prompts=self.snippets[kind], **_arguments(kind, content)
        )
        # Upstream makes arrays of MLX, whatever it is asked for: they end in this thread.
        arrays = {name: np.array(value) for name, value in inputs.items() if value is not None}
        if not all(array.size for array in arrays.values()):
            raise ProcessorError("is too short for it to read anything")
        return arrays

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
        inputs.pop("attention_mask", None)
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

    def _remember(self, prepared: PreparedMedium) -> None:
        if prepared.digest in self._prepared:
            return
        self._prepared[prepared.digest] = prepared
        self._prepared_bytes += prepared.nbytes
        while self._prepared_bytes > PREPARED_MEDIA_BYTES and len(self._prepared) > 1:
            self._prepared_bytes -= self._prepared.popitem(last=False)[1].nbytes


def _arguments(kind: MediaKind, content: Content) -> dict[str, Any]:
    """Return the content by the names of mlx-vlm's `prepare_inputs`."""
    match kind:
        case MediaKind.IMAGE:
            return {"images": [content]}
        case MediaKind.AUDIO:
            return {"audio": [content]}
        case MediaKind.VIDEO:
            count = len(content.frames)
            shown = {
                "total_num_frames": count,
                "fps": content.fps,
                "frames_indices": list(range(count)),
            }
            return {"videos": [content.frames], "video_metadata": [shown]}
        case _:
            assert_never(kind)
