"""Converts media to tokens and arrays with a checkpoint's processor."""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, assert_never

from backend.core.prompt import MediaKind, MediaSpan, PreparedMedium
from backend.model.text.template import Snippets
from backend.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

# Each id that the vocabulary does not have: such ids are below 0 in all checkpoints.
NO_TOKEN = -1

# Values returned by upstream's processors.
Untyped: TypeAlias = Any
# A processor of transformers or of mlx-vlm, which are untyped.
HfProcessor: TypeAlias = Any


def read_prompt(
    processor: HfProcessor, text: str, media: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the non-empty results of a processor for a prompt, by mlx-vlm's names.

    Args:
        processor: Made by mlx-vlm.
        media: Keyword arguments of mlx-vlm's `prepare_inputs`.
    """
    from mlx_vlm.utils import prepare_inputs

    inputs = prepare_inputs(processor, prompts=text, image_token_index=NO_TOKEN, **media)
    inputs.pop("attention_mask", None)
    # Upstream always returns MLX arrays: they must not leave this thread.
    arrays = {name: as_numpy(value) for name, value in inputs.items() if value is not None}
    return {name: array for name, array in arrays.items() if len(array)}


def as_numpy(value: Untyped) -> Untyped:
    """Return an array, or a list of arrays if their shapes differ."""
    import mlx.core as mx
    import numpy as np

    # NumPy has no bfloat16.
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        value = value.astype(mx.float32)
    try:
        return np.atleast_1d(np.array(value))
    except ValueError:
        return [as_numpy(each) for each in value]


# Arguments of feature extractors, whose defaults apply.
_CUT_BY = ("truncation", "max_length")


def most_heard_s(processor: HfProcessor, sampling_rate: int) -> float | None:
    """Return the length in seconds of the longest sound that a processor takes whole.

    Args:
        processor: May cut sounds without a word.
        sampling_rate: Of its sounds, in Hz.
    """
    tokens = getattr(processor, "audio_seq_length", None)
    ms_per_token = getattr(processor, "audio_ms_per_token", None)
    if tokens and ms_per_token:
        return float(tokens * ms_per_token / 1000)
    extractor = getattr(processor, "feature_extractor", None)
    options = signature(extractor).parameters if callable(extractor) else {}
    cuts, samples = (options[name].default if name in options else None for name in _CUT_BY)
    return samples / sampling_rate if cuts is True and isinstance(samples, int) else None


_FAKE = "<fake_token_around_image>"


@dataclass(frozen=True, slots=True)
class Join:
    """How media and the text between them are joined.

    Attributes:
        closing: The token after a medium, which is also the one before the next; "" if none is.
        rules: Patterns in a prompt with its media, and their replacements, in order.
    """

    closing: str = ""
    rules: Sequence[tuple[str, str]] = ()


# By processor class.
_JOINS: Mapping[str, Join] = {
    "Idefics2Processor": Join(_FAKE, ((_FAKE * 2, _FAKE), (rf"{_FAKE}(?=[^\s<])", f"{_FAKE} "))),
}


def join_of(processor: HfProcessor) -> Join:
    """Return how a processor joins media and text."""
    return _JOINS.get(type(processor).__name__, Join())


def joined(text: str, rules: Sequence[tuple[str, str]]) -> str:
    """Return a prompt with its media after the rules of a join."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


# Marks the pixels that are no padding; without it all are of the picture.
_MASK = "pixel_attention_mask"


def shown_pixels(inputs: Mapping[str, Any]) -> int:
    """Return the number of pixel values, or of marked ones; 0 for a medium without pixels."""
    mask = inputs.get(_MASK)
    return int(getattr(inputs.get("pixel_values"), "size", 0) if mask is None else mask.sum())


def known_ids(ids: Sequence[int]) -> list[int]:
    """Return ids with `NO_TOKEN` for each that the vocabulary does not have."""
    return [max(token_id, NO_TOKEN) for token_id in ids]


def longest_run(ids: Sequence[int]) -> tuple[int, int]:
    """Return the range of the longest run of one id; of equals the first."""
    start, longest = 0, (0, 0)
    for _, equal in groupby(ids):
        stop = start + len(list(equal))
        longest = max(longest, (start, stop), key=lambda run: run[1] - run[0])
        start = stop
    return longest


def with_run(ids: Sequence[int], token_id: int, count: int) -> list[int]:
    """Return ids with `count` times a token in place of their longest run."""
    start, stop = longest_run(ids)
    return [*ids[:start], *[token_id] * count, *ids[stop:]]


# Exceptions of upstream's processors: arrays of a wrong shape can lead to anything.
PROCESSOR_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)

DEFAULT_FPS = 2.0

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids", "images_seq_mask", "labels")
_NOTHING = "gives the model only its tokens"
_NAMED = ("bos_token", "eos_token", "pad_token")
_TOKEN_INPUTS = ("input_ids", *_PER_TOKEN)


class ProcessorError(Exception):
    """A processor refuses a medium; carries the processor's message."""


@dataclass(frozen=True, slots=True)
class Film:
    """RGB frames [T, H, W, 3], and their number per second."""

    frames: np.ndarray = field(repr=False)
    fps: float


Content: TypeAlias = Any
"""A PIL image in RGB, samples [N] at the processor's rate, or a `Film`."""


def film(images: Sequence[Any], *, duration_s: float) -> Film:
    """Make a film of equally sized PIL images, the last of which is shown after `duration_s`."""
    import numpy as np

    is_timed = duration_s > 0 and len(images) > 1
    fps = (len(images) - 1) / duration_s if is_timed else DEFAULT_FPS
    return Film(np.stack([np.asarray(image) for image in images]), fps)


def raw(kind: MediaKind, content: Content) -> tuple[np.ndarray, float]:
    """Return a medium as an array, and its frames per second."""
    import numpy as np

    if kind is MediaKind.VIDEO:
        return content.frames, content.fps
    return np.asarray(content), DEFAULT_FPS


def content_of(kind: MediaKind, array: np.ndarray, fps: float) -> Content:
    """Return the medium of an array; the inverse of `raw`."""
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


class MediaPreparer(Protocol):
    """Prepares media for a model; thread-safe.

    Attributes:
        takes_parts: Whether the template writes the snippets; else they are put into messages.
        sampling_rate: Rate of the sounds that it takes, in Hz.
    """

    snippets: Mapping[MediaKind, str]
    takes_parts: bool
    sampling_rate: int

    def prepare(self, kind: MediaKind, content: Content, digest: bytes) -> PreparedMedium:
        """Return a medium's text, tokens and arrays."""


class MediaProcessor:
    """A checkpoint's processor with a lock; thread-safe.

    Attributes:
        takes_parts: Whether the template writes the snippets; else they are put into messages.
        takes_sounds: Whether it takes more than one sound per prompt.
        sampling_rate: Rate of the sounds that it takes, in Hz.
    """

    def __init__(
        self,
        processor: HfProcessor,
        tokenizer: Tokenizer,
        snippets: Snippets,
        rates: Mapping[MediaKind, Fraction] | None = None,
    ) -> None:
        """Wrap a processor.

        Args:
            processor: Owned by this object from now on.
            rates: Embeddings per pixel value, for kinds whose tokens do not tell their number.
        """
        self._processor = processor
        self._tokenizer = tokenizer
        self._rates = dict(rates or {})
        self._join = join_of(processor)
        self._lock = threading.Lock()
        self.snippets = snippets.texts
        self.takes_parts = snippets.takes_parts
        extractor = getattr(processor, "feature_extractor", None)
        self.takes_sounds: bool = getattr(processor, "supports_multiple_audio", False)
        self.sampling_rate: int = getattr(extractor, "sampling_rate", 16_000)

    def without(self, kinds: Container[MediaKind]) -> MediaProcessor | None:
        """Return a copy for the other kinds only, or `None` if there are none."""
        left = {kind: text for kind, text in self.snippets.items() if kind not in kinds}
        if not left:
            return None
        chosen = Snippets(left, takes_parts=self.takes_parts)
        return MediaProcessor(self._processor, self._tokenizer, chosen, self._rates)

    def resize(self, medium: PreparedMedium, embeddings: int) -> bool:
        """Give media as many tokens as mlx-vlm makes embeddings of them, once for each kind.

        Args:
            embeddings: Number of its embeddings; that of others is in proportion to their pixels.

        Returns:
            Whether the tokens of this kind have changed.
        """
        start, stop = longest_run(medium.token_ids)
        count = embeddings - len(medium.token_ids) + stop - start
        size = shown_pixels(medium.inputs)
        if medium.kind in self._rates or count <= 0 or size == 0:
            return False
        self._rates[medium.kind] = Fraction(count, size)
        return True

    def prepare(self, kind: MediaKind, content: Content, digest: bytes) -> PreparedMedium:
        """Return a medium's text, tokens and arrays."""
        with self._lock, self._as_processor_errors():
            inputs = self._process(kind, content)
        return self._described(kind, digest, inputs)

    def prepare_whole(
        self, kind: MediaKind, contents: Sequence[Content], text: str
    ) -> dict[str, np.ndarray]:
        """Return upstream's tokens (`input_ids`, [1, T]) and arrays for a whole prompt."""
        with self._lock, self._as_processor_errors():
            return read_prompt(self._processor, text, _arguments(kind, contents))

    @contextmanager
    def _as_processor_errors(self) -> Iterator[None]:
        try:
            yield
        except PROCESSOR_FAILURES as error:
            raise ProcessorError(self._explained(error)) from error

    def _explained(self, error: Exception) -> str:
        """Return the processor's message, or the names of values that it may need but lacks."""
        text = " ".join(str(error).split())
        if "NoneType" not in text:
            return text
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        missing = [name for name in _NAMED if getattr(tokenizer, name, None) is None]
        if not missing:
            return f"needs a setting that the checkpoint's files do not have ({text})"
        named = " and no ".join(missing)
        return f"needs a token that tokenizer_config.json does not name: there is no {named}"

    def _process(self, kind: MediaKind, content: Content) -> dict[str, np.ndarray]:
        """Run the processor over one medium, as if it were the whole prompt."""
        if kind is MediaKind.AUDIO:
            self._require_heard(len(content) / self.sampling_rate)
        inputs = read_prompt(self._processor, self.snippets[kind], _arguments(kind, [content]))
        if all(name in _TOKEN_INPUTS or array.size == 0 for name, array in inputs.items()):
            reason = "is too short" if kind is MediaKind.AUDIO else _NOTHING
            raise ProcessorError(reason)
        return inputs

    def _require_heard(self, seconds: float) -> None:
        most = most_heard_s(self._processor, self.sampling_rate)
        if most is not None and seconds > most:
            raise ProcessorError(f"is {seconds:.1f} s long, {most:g} s is the most that is heard")

    def _described(
        self, kind: MediaKind, digest: bytes, inputs: dict[str, np.ndarray]
    ) -> PreparedMedium:
        ids = known_ids(inputs.pop("input_ids").reshape(-1).tolist())
        lead = self._lead(ids)
        start, stop = self._core(ids, len(lead))
        for name in _PER_TOKEN:
            if name in inputs:
                inputs[name] = inputs[name][..., start:stop]
        core = self._own(kind, ids[start:stop], inputs)
        shown = [*ids[len(lead) : start], *core, *ids[stop:]]
        text = self._tokenizer.decode(shown)
        if self._tokenizer.encode(text, adds_special=False) != shown:
            raise ProcessorError("the text of its tokens is tokenised differently")
        special = self._tokenizer.special_texts
        marks = frozenset(special[token_id] for token_id in core if token_id in special)
        begin = self._tokenizer.decode(lead)
        rules = self._join.rules
        return PreparedMedium(kind, digest, text, tuple(core), inputs, marks, begin, tuple(rules))

    def _lead(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the BOS token at the start of some tokens, if there is one."""
        bos = getattr(getattr(self._processor, "tokenizer", None), "bos_token_id", None)
        return ids[:1] if bos is not None and ids[:1] == [bos] else []

    def _core(self, ids: Sequence[int], start: int) -> tuple[int, int]:
        """Return the range of the special tokens, which never merge with adjacent text."""
        special = [n for n, each in enumerate(ids) if each in self._marks or each == NO_TOKEN]
        special = [index for index in special if index >= start]
        if not special:
            raise ProcessorError("it has no special token")
        is_shared = self._marks.get(ids[special[-1]]) == self._join.closing
        return special[0], special[-1] + 1 - is_shared

    def _own(self, kind: MediaKind, core: Sequence[int], inputs: dict[str, Any]) -> Sequence[int]:
        """Return tokens for upstream's, as many as there are embeddings; keep upstream's."""
        if NO_TOKEN not in core and kind not in self._rates:
            return core
        import numpy as np

        inputs["input_ids"] = np.array([core])
        start, stop = longest_run(core)
        rate = self._rates.get(kind)
        count = int(rate * shown_pixels(inputs)) if rate else stop - start
        return with_run(core, self._stand_in(core[start]), count)

    def _stand_in(self, token_id: int) -> int:
        """Return a special token in place of an id that may be none."""
        if token_id != NO_TOKEN:
            return token_id
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        pad: int | None = getattr(tokenizer, "pad_token_id", None)
        return next(iter(self._marks)) if pad is None or pad not in self._marks else pad

    @property
    def _marks(self) -> Mapping[int, str]:
        return self._tokenizer.added_texts


def _arguments(kind: MediaKind, contents: Sequence[Content]) -> dict[str, Any]:
    """Return media as keyword arguments of mlx-vlm's `prepare_inputs`."""
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


class LostMediumError(Exception):
    """The tokens of a medium are not in the prompt; `number` is its index, from 0."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the tokens of medium {number} are not in the prompt")
        self.number = number


def find_spans(token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
    """Locate the tokens of media in a prompt; both are in text order.

    Raises:
        LostMediumError: The tokens of a medium are missing.
    """
    places = _places(token_ids, [medium.token_ids for medium in media])
    return tuple(
        MediaSpan(start, stop, medium.digest, medium.inputs)
        for medium, (start, stop) in zip(media, places, strict=True)
    )


def with_own_tokens(upstream_ids: Sequence[int], media: Sequence[PreparedMedium]) -> list[int]:
    """Return mlx-vlm's tokens of a prompt with this backend's own tokens for its media.

    Raises:
        LostMediumError: The tokens of a medium are missing.
    """
    ids, shown, seen = known_ids(upstream_ids), list[int](), 0
    places = _places(ids, [medium.upstream_ids for medium in media])
    for medium, (start, stop) in zip(media, places, strict=True):
        shown += [*ids[seen:start], *medium.token_ids]
        seen = stop
    return shown + ids[seen:]


def as_processed(text: str, media: Sequence[PreparedMedium]) -> str:
    """Return a prompt's text with the BOS token and the joins that its media require."""
    if not media:
        return text
    text = joined(text, media[0].rules)
    return text if text.startswith(media[0].lead) else media[0].lead + text


def _places(token_ids: Sequence[int], wanted: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield where runs of tokens that follow one another begin and end.

    Raises:
        LostMediumError: One of them is missing.
    """
    stop = 0
    for number, run in enumerate(wanted):
        start = _find(token_ids, run, stop)
        if start < 0:
            raise LostMediumError(number)
        stop = start + len(run)
        yield start, stop


def _find(token_ids: Sequence[int], wanted: Sequence[int], start: int) -> int:
    """Return the start of a run of tokens, or -1."""
    last = len(token_ids) - len(wanted)
    while start <= last:
        try:
            start = token_ids.index(wanted[0], start, last + 1)
        except ValueError:
            return -1
        if tuple(token_ids[start : start + len(wanted)]) == tuple(wanted):
            return start
        start += 1
    return -1
