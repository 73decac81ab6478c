"""Finds out which media a loaded model takes, and how they enter its prompts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from backend.core.prompt import MediaKind, MediaSpan, Message, Placement, PreparedMedium, Prompt
from backend.errors import InvalidRequestError
from backend.model.checkpoint.failures import one_line
from backend.model.text.template import ChatTemplate, find_snippets, written_out
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.media_processor import (
    PROCESSOR_FAILURES,
    Content,
    Film,
    HfProcessor,
    LostMediumError,
    MediaProcessor,
    ProcessorError,
    as_processed,
    find_spans,
    with_own_tokens,
)
from backend.model.vision.towers import is_tokenizer
from backend.model.vision.vision_network import NotEmbeddableError, OtherCountError, VisionNetwork

# A non-square picture reveals swapped rows and columns.
_SIDES = ((64, 64), (48, 96))
_FRAMES = 4
_FPS = 2.0
_SECONDS = 1.0
_LOUDNESS = 0.1

log = logging.getLogger(__name__)


def sample(
    kind: MediaKind, *, sampling_rate: int, number: int = 0, has_own_size: bool = True
) -> Content:
    """Return a medium determined by its number.

    Args:
        sampling_rate: Rate of a sound, in Hz.
        number: Determines the content.
        has_own_size: Whether the number determines the shape of a picture, too.
    """
    rng = np.random.default_rng(number)
    height, width = _SIDES[number % len(_SIDES) if has_own_size else 0]
    match kind:
        case MediaKind.IMAGE:
            from PIL import Image

            return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        case MediaKind.AUDIO:
            noise = rng.standard_normal(int(_SECONDS * sampling_rate))
            return (_LOUDNESS * noise).astype(np.float32)
        case MediaKind.VIDEO:
            return Film(rng.integers(0, 256, (_FRAMES, height, width, 3), np.uint8), _FPS)
        case _:
            assert_never(kind)


_QUESTION = "What is shown here, and what was it before?"
_MOST = 2
_PLACES = (0, _QUESTION.index(","))


class OtherTokensError(ProcessorError):
    """The libraries' tokens differ from this backend's, which prepares media one by one."""

    def __init__(self) -> None:
        super().__init__("it writes other tokens for it inside a prompt than alone")


@dataclass(frozen=True, slots=True)
class MediaTrial:
    """One prompt, prepared in two ways.

    Attributes:
        prompt: The prompt as this backend feeds it.
        whole_inputs: Output of the model's processor for the prompt with all its media at once,
            by mlx-vlm's names, with its tokens `input_ids` [1, T].
    """

    prompt: Prompt
    whole_inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Examiner:
    """Builds trials for a model.

    Attributes:
        template: The model's template; without one, questions are plain text.
    """

    processor: MediaProcessor
    tokenizer: Tokenizer
    template: ChatTemplate

    def most(self, kind: MediaKind) -> int:
        """Return how many media of a kind the libraries take per prompt, at most 2."""
        return _MOST if kind is not MediaKind.AUDIO or self.processor.takes_sounds else 1

    def trial(self, kind: MediaKind, count: int) -> MediaTrial:
        """Return a question about media of one kind, 1 or 2 of them.

        Some processors only take media of one size together; they get such media.

        Raises:
            ProcessorError: This backend and the libraries read different tokens.
        """
        text = self._text(kind, count)
        try:
            return self._trial(kind, count, text, have_own_sizes=True)
        except ProcessorError:
            if count == 1:
                raise
            return self._trial(kind, count, text, have_own_sizes=False)

    def _trial(self, kind: MediaKind, count: int, text: str, *, have_own_sizes: bool) -> MediaTrial:
        rate = self.processor.sampling_rate
        contents = [
            sample(kind, sampling_rate=rate, number=number, has_own_size=have_own_sizes)
            for number in range(count)
        ]
        whole = self.processor.prepare_whole(kind, contents, text)
        names = (f"trial {kind.name} {number} {have_own_sizes}" for number in range(count))
        media = [
            self.processor.prepare(kind, content, name.encode())
            for content, name in zip(contents, names, strict=True)
        ]
        ids = _own_tokens(whole, media)
        own = self._own_ids(text, media)
        # Either side may begin with a token that the other leaves out.
        lead = len(ids) - len(own)
        if lead not in (0, 1) or ids[lead:] != own:
            raise OtherTokensError
        return MediaTrial(Prompt(tuple(ids), media=_spans(ids, media)), whole)

    def _text(self, kind: MediaKind, count: int) -> str:
        """Return the rendered question, with snippets in place of media."""
        placements = tuple(Placement(place, kind) for place in _PLACES[:count])
        message = Message(role="user", content=_QUESTION, media=placements)
        flat = written_out(message, self.processor.snippets)
        try:
            shown = message if self.processor.takes_parts else flat
            return self.template.render([shown], (), {})
        except InvalidRequestError:
            return flat.content

    def _own_ids(self, text: str, media: Sequence[PreparedMedium]) -> list[int]:
        parts = text.split(self.processor.snippets[media[0].kind])
        if len(parts) != len(media) + 1:
            problem = f"its template has places for {len(parts) - 1} of {len(media)} media"
            raise ProcessorError(problem)
        texts = [*(medium.text for medium in media), ""]
        joined = "".join(part + text for part, text in zip(parts, texts, strict=True))
        return self.tokenizer.encode(as_processed(joined, media), adds_special=False)


def _own_tokens(inputs: Mapping[str, Any], media: Sequence[PreparedMedium]) -> list[int]:
    """Return the processor's tokens of a prompt, with this backend's own for its media."""
    try:
        return with_own_tokens(inputs["input_ids"].reshape(-1).tolist(), media)
    except LostMediumError as error:
        raise OtherTokensError from error


def _spans(ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
    try:
        return find_spans(ids, media)
    except LostMediumError as error:
        raise ProcessorError(str(error)) from error


_OWN_TOKENS = {
    MediaKind.IMAGE: ("boi_token", "image_token"),
    MediaKind.AUDIO: ("boa_token", "audio_token"),
    MediaKind.VIDEO: ("video_token",),
}
_UNFIT = (
    "prepared by itself, which this backend does, "
    "the arrays of mlx-vlm's processor do not fit its towers"
)
_NO_PROCESSOR = (
    "mlx-vlm has no processor for this family; one that comes with a checkpoint needs the option "
    "trust_remote_code:true"
)
_NO_PLACE = "mlx-vlm puts it before the whole prompt, which this backend does not do"
_WORD = "Qx7"
# The second picture has another shape.
_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class MediaSupport:
    """The media that a model takes.

    Attributes:
        processor: Processor for those kinds; `None` if there are none: the model is text-only.
        refused: Kinds that its template supports but that do not work, with the reasons.
    """

    processor: MediaProcessor | None
    refused: Mapping[MediaKind, str]


def find_media_support(
    processor: HfProcessor, tokenizer: Tokenizer, template: ChatTemplate, network: VisionNetwork
) -> MediaSupport:
    """Try every kind of media that a model may take, before its weights are read.

    Args:
        processor: The checkpoint's processor; owned by this function from now on.
        template: The model's template, which may support media.
        network: The model, whose weights may still be lazy.
    """
    listed = _listed_text(network.model.config.model_type)
    found = find_snippets(template, _own_texts(processor, listed))
    if is_tokenizer(processor) and not hasattr(processor, "image_processor"):
        return MediaSupport(None, dict.fromkeys(found.texts, _NO_PROCESSOR))
    if not found.texts and listed == "" and hasattr(network.model.config, "vision_config"):
        return MediaSupport(None, {MediaKind.IMAGE: _NO_PLACE})
    media = MediaProcessor(processor, tokenizer, found)
    faults = {kind: _fault(media, kind, network) for kind in media.snippets}
    refused = {kind: fault for kind, fault in faults.items() if fault is not None}
    for kind, fault in refused.items():
        log.warning("no %s input: %s", kind.value, fault)
    return MediaSupport(media.without(refused), refused)


def _fault(media: MediaProcessor, kind: MediaKind, network: VisionNetwork) -> str | None:
    """Return why a kind of media cannot be used, or `None` if it can."""
    try:
        _require_shown(media, kind, network)
    except ProcessorError as error:
        return f"the model's processor: {error}"
    except NotEmbeddableError as error:
        return str(error)
    except PROCESSOR_FAILURES as error:
        log.warning("the model's towers raise %s: %s", type(error).__name__, one_line(error))
        return _UNFIT
    return None


def _require_shown(
    media: MediaProcessor, kind: MediaKind, network: VisionNetwork, number: int = 0
) -> None:
    """Check that a medium replaces its tokens; gives the kind other numbers of them if need be."""
    content = sample(kind, sampling_rate=media.sampling_rate, number=number)
    prepared = media.prepare(kind, content, kind.name.encode())
    try:
        network.require_media_in_place(prepared.token_ids, prepared.inputs)
    except OtherCountError as error:
        if not media.resize(prepared, error.embeddings):
            raise
        for each in range(_SAMPLES):
            _require_shown(media, kind, network, each)


def _own_texts(processor: HfProcessor, listed: str | None) -> dict[MediaKind, str]:
    """Return the texts that the processor replaces: those it declares, or mlx-vlm lists."""
    texts = {
        kind: next((text for name in names if (text := getattr(processor, name, None))), None)
        for kind, names in _OWN_TOKENS.items()
    }
    texts[MediaKind.IMAGE] = texts[MediaKind.IMAGE] or listed
    return {kind: text for kind, text in texts.items() if text and isinstance(text, str)}


def _listed_text(model_type: str) -> str | None:
    """Return the text that mlx-vlm itself writes for an image, if it has the family in its list.

    It is "" if the family's processor puts images before all text, and `None` for a family whose
    chat template writes it.
    """
    from mlx_vlm.prompt_utils import MODEL_CONFIG, MessageFormatter

    if model_type not in MODEL_CONFIG:
        return None
    message = MessageFormatter(model_type).format_message(_WORD, num_audios=0)
    written = message["content"] if isinstance(message, dict) else message
    return written.replace(_WORD, "") if isinstance(written, str) else None
