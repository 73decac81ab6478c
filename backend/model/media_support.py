"""Find out which media a loaded model takes, and how they come into its prompts."""

import logging
from collections.abc import Iterator

import numpy as np

from backend.core.media import MediaKind
from backend.errors import UnsupportedModelError
from backend.model.media_processor import (
    Content,
    Film,
    HfProcessor,
    MediaProcessor,
    ProcessorError,
)
from backend.model.snippets import find_snippets
from backend.model.template import ChatTemplate
from backend.model.tokenizer import Tokenizer
from backend.model.vision_network import NotEmbeddableError, VisionNetwork

_TRIAL_SIDE = 64
_TRIAL_FRAMES = 4
_OWN_TOKENS = {
    MediaKind.IMAGE: ("boi_token", "image_token"),
    MediaKind.AUDIO: ("boa_token", "audio_token"),
    MediaKind.VIDEO: ("video_token",),
}

log = logging.getLogger(__name__)


def find_media_support(
    processor: HfProcessor, tokenizer: Tokenizer, template: ChatTemplate, network: VisionNetwork
) -> MediaProcessor | None:
    """Return the processor for the kinds of media that a model can take.

    Each kind is tried on something blank. `None`, with a warning, when none works: the model then
    reads text.

    Args:
        processor: The checkpoint's; used by nobody else from here on.
        tokenizer: The model's.
        template: The model's: it may have a place for media.
        network: The model; its weights may not be evaluated yet.

    Raises:
        UnsupportedModelError: Its media reach it on a way that cannot be batched.
    """
    found = find_snippets(template, _own_tokens(processor))
    media = MediaProcessor(processor, tokenizer, found)
    working = dict(_working(media, network))
    log.info("media that can be read: %s", ", ".join(kind.value for kind in working) or "none")
    return media.limited_to(working) if working else None


def _working(media: MediaProcessor, network: VisionNetwork) -> Iterator[tuple[MediaKind, str]]:
    for kind, snippet in media.snippets.items():
        try:
            prepared = media.prepare(kind, _blank(kind, media.sampling_rate), kind.name.encode())
            network.require_media_in_place(prepared.token_ids, prepared.inputs)
        except ProcessorError as error:
            log.warning("no media of the kind %s: %s", kind.value, error)
        except NotEmbeddableError as error:
            raise UnsupportedModelError(
                f"the model brings media of the kind {kind.value} to its text by {error}, and not "
                "in the place of tokens, which cannot be served here: load its text part with the "
                "option vision:false"
            ) from error
        else:
            yield kind, snippet


def _blank(kind: MediaKind, sampling_rate: int) -> Content:
    pixels = np.full((_TRIAL_FRAMES, _TRIAL_SIDE, _TRIAL_SIDE, 3), 127, np.uint8)
    match kind:
        case MediaKind.IMAGE:
            from PIL import Image

            return Image.fromarray(pixels[0])
        case MediaKind.AUDIO:
            return np.zeros(sampling_rate, np.float32)
        case MediaKind.VIDEO:
            return Film(pixels, fps=2.0)


def _own_tokens(processor: HfProcessor) -> dict[MediaKind, str]:
    """Return what the processor itself says that it replaces."""
    texts = {
        kind: next((text for name in names if (text := getattr(processor, name, None))), None)
        for kind, names in _OWN_TOKENS.items()
    }
    return {kind: text for kind, text in texts.items() if isinstance(text, str)}
