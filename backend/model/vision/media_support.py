"""Finds out which media a loaded model takes, and how they enter its prompts."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from backend.core.media import MediaKind
from backend.model.checkpoint.failures import one_line
from backend.model.text.snippets import find_snippets
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.media_processor import (
    PROCESSOR_FAILURES,
    MediaProcessor,
    ProcessorError,
)
from backend.model.vision.processor_call import HfProcessor
from backend.model.vision.samples import sample
from backend.model.vision.towers import is_tokenizer
from backend.model.vision.vision_network import (
    NotEmbeddableError,
    OtherCountError,
    VisionNetwork,
)

_OWN_TOKENS = {
    MediaKind.IMAGE: ("boi_token", "image_token"),
    MediaKind.AUDIO: ("boa_token", "audio_token"),
    MediaKind.VIDEO: ("video_token",),
}
_UNFIT = (
    "prepared by itself, which this backend does, "
    "what mlx-vlm's processor makes of it does not fit its towers"
)
_NO_PROCESSOR = (
    "mlx-vlm has no processor for this family; one that comes with a checkpoint needs the option "
    "trust_remote_code:true"
)
_NO_PLACE = "mlx-vlm puts it before the whole prompt, which this backend does not do"
_WORD = "Qx7"
# The second picture has another shape.
_SAMPLES = 2

log = logging.getLogger(__name__)


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
        tokenizer: The model's tokenizer.
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
