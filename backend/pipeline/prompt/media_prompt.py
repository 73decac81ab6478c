"""Decodes and prepares the media of a request, and places them in its text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from backend.core.media import MEDIA_MARKER, MediaKind, PreparedMedium
from backend.core.prompt import Placement
from backend.errors import InvalidRequestError
from backend.media.decode import DecodedAudio, DecodedImage, DecodedVideo, decode
from backend.model.text.guard import Disarmer
from backend.model.text.template import written_out
from backend.model.vision.media_processor import ProcessorError, film
from common.rpc import require_caller

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from backend.core.media import Medium
    from backend.core.model import ModelCard
    from backend.core.prompt import Message, Tool
    from backend.core.request import GenerationCall
    from backend.media.decode import Decoded
    from backend.model.vision.media_processor import Content, MediaPreparer
    from backend.pipeline.served_model import ServedModel

# An invisible character of zero width.
_WORD_JOINER = "\u2060"


class Placeholders(Disarmer):
    """The texts that represent media, or parts of them, in a model's prompts."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Compile the texts.

        Args:
            texts: Each part precedes the texts that contain it.
        """
        self._texts = tuple(dict.fromkeys(texts))

    def disarmed(self, text: str) -> str:
        """Return the text with every placeholder broken by an invisible character."""
        for placeholder in self._texts:
            text = text.replace(placeholder, placeholder[0] + _WORD_JOINER + placeholder[1:])
        return text


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The media of one prompt, and the snippets that represent them in its text.

    Attributes:
        prepared: The media, in request order.
        snippets: Text that a template writes for a medium, by kind.
    """

    prepared: Sequence[PreparedMedium] = ()
    snippets: Mapping[MediaKind, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """The text of a request, with its media placed.

    Attributes:
        messages: The conversation; empty for a raw prompt.
        prompt: A raw prompt; empty for a conversation.
        tools: Tools shown to the model.
    """

    messages: Sequence[Message]
    prompt: str
    tools: Sequence[Tool] = ()
    media: PlacedMedia = field(default_factory=PlacedMedia)


def media_prompt(call: GenerationCall, model: ServedModel) -> MediaPrompt:
    """Decode, prepare and place the media of a request; may take a second.

    Raises:
        InvalidRequestError: A medium cannot be read, has no place, or is of a kind that the model
            does not take.
        UnsupportedError: A required library is not installed.
        AbandonedError: The caller has gone.
    """
    tools = model.guard.tools(call.shown_tools)
    if not call.media:
        return MediaPrompt(model.guard.messages(call.messages), call.prompt, tools)
    _require_taken(call.media, model.card)
    processor = model.media
    if processor is None:
        raise InvalidRequestError(call.media[0].field, "the loaded model reads text only")
    prepared = [_prepared(medium, processor) for medium in call.media]
    snippets = processor.snippets
    media = PlacedMedia(prepared, snippets)
    if not call.messages:
        return MediaPrompt((), _raw_prompt(call.prompt, prepared, snippets), media=media)
    marks = [mark for medium in prepared for mark in medium.marks]
    # Marks first: they may be parts of snippets.
    placeholders = Placeholders([*marks, *snippets.values()])
    placed = model.guard.messages(_placed(call.messages, prepared, model))
    harmless = [placeholders.disarmed_message(message) for message in placed]
    tools = [placeholders.disarmed_tool(tool) for tool in tools]
    if not processor.takes_parts:
        harmless = [written_out(message, snippets) for message in harmless]
    return MediaPrompt(harmless, "", tools, media)


def _require_taken(media: Sequence[Medium], card: ModelCard) -> None:
    """Refuse media that the model is not shown correctly, according to its checks at load."""
    seen: set[MediaKind] = set()
    for medium in media:
        kind = medium.kind
        if reason := card.refused_media.get(kind):
            problem = f"{kind.value} input of this model is not served: {reason}"
            raise InvalidRequestError(medium.field, problem)
        if kind in seen and (reason := card.single_media.get(kind)):
            problem = f"this model takes one {kind.value} per prompt: {reason}"
            raise InvalidRequestError(medium.field, problem)
        seen.add(kind)


def _prepared(medium: Medium, processor: MediaPreparer) -> PreparedMedium:
    require_caller()
    if medium.kind not in processor.snippets:
        taken = ", ".join(kind.value for kind in processor.snippets)
        problem = f"the loaded model takes no {medium.kind.value}: it takes {taken}"
        raise InvalidRequestError(medium.field, problem)
    decoded = decode(medium, sampling_rate=processor.sampling_rate)
    try:
        return processor.prepare(medium.kind, _content(decoded), decoded.digest)
    except ProcessorError as error:
        raise InvalidRequestError(medium.field, f"the model's processor: {error}") from error


def _content(decoded: Decoded) -> Content:
    match decoded:
        case DecodedImage():
            return decoded.image
        case DecodedAudio():
            return decoded.samples
        case DecodedVideo():
            images = [frame.image for frame in decoded.frames]
            return film(images, duration_s=decoded.frames[-1].time_s)
        case _:
            assert_never(decoded)


def _raw_prompt(
    prompt: str, prepared: Sequence[PreparedMedium], texts: Mapping[MediaKind, str]
) -> str:
    """Return a prompt with its markers replaced by snippets.

    A prompt in the model's own format may already contain the snippets; a prompt with neither
    gets them at its start.

    Raises:
        InvalidRequestError: The number of markers or snippets is not that of the media.
    """
    snippets = [texts[medium.kind] for medium in prepared]
    markers = prompt.count(MEDIA_MARKER)
    own = sum(prompt.count(snippet) for snippet in set(snippets))
    if markers == len(snippets):
        spelled = Placeholders([*snippets, *(medium.text for medium in prepared)])
        parts = spelled.disarmed(prompt).split(MEDIA_MARKER)
        text = parts[0] + "".join(s + part for s, part in zip(snippets, parts[1:], strict=True))
    elif markers == 0 and own in (0, len(snippets)):
        text = prompt if own else "".join(snippets) + prompt
    else:
        problem = f"has {markers or own} places for {len(snippets)} media"
        raise InvalidRequestError("Prompt", problem)
    # Decoding starts from a text token.
    return text + "\n" if text.endswith(tuple(snippets)) else text


def _placed(
    messages: Sequence[Message], prepared: Sequence[PreparedMedium], model: ServedModel
) -> list[Message]:
    """Assign every medium to a message: by markers, or from memory without them."""
    kinds = [medium.kind for medium in prepared]
    markers = sum(message.content.count(MEDIA_MARKER) for message in messages)
    if markers:
        if markers != len(kinds):
            problem = f"hold {markers} media markers for {len(kinds)} media"
            raise InvalidRequestError("Messages", problem)
        queue = iter(kinds)
        return [_with_markers(message, queue) for message in messages]
    digests = {kind: [m.digest for m in prepared if m.kind is kind] for kind in MediaKind}
    counts = model.placements.place(messages, digests)
    return [
        replace(
            message, media=tuple(Placement(0, kind) for kind, n in count.items() for _ in range(n))
        )
        for message, count in zip(messages, counts, strict=True)
    ]


def _with_markers(message: Message, kinds: Iterator[MediaKind]) -> Message:
    """Turn a message's markers into placements."""
    parts = message.content.split(MEDIA_MARKER)
    offset, media = 0, []
    for part in parts[:-1]:
        offset += len(part)
        media.append(Placement(offset, next(kinds)))
    return replace(message, content="".join(parts), media=tuple(media))
