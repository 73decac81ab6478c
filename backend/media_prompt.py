"""The media of a request: decoded, placed in what it says, and found again in its tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from backend.beside import require_wanted
from backend.core.media import MEDIA_MARKER, MediaKind
from backend.core.prompt import MediaSpan, Placement
from backend.errors import InvalidRequestError
from backend.media.decode import DecodedAudio, DecodedImage, DecodedVideo, decode
from backend.media_placement import placements_of
from backend.model.media_processor import ProcessorError, film
from backend.placeholders import Placeholders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from backend.core.media import Medium
    from backend.core.prompt import Message, Tool
    from backend.core.request import GenerationCall
    from backend.media.decode import Decoded
    from backend.model.loaded import LoadedModel
    from backend.model.media_processor import Content, MediaProcessor, PreparedMedium


@dataclass(frozen=True, slots=True)
class Expanded:
    """A text with the tokens of media written out, and these media in the order of the text."""

    text: str
    media: Sequence[PreparedMedium] = ()

    def spans(self, token_ids: Sequence[int]) -> tuple[MediaSpan, ...]:
        """Find the media in the tokens of the text.

        Raises:
            InvalidRequestError: One of them is not there.
        """
        spans: list[MediaSpan] = []
        start = 0
        for number, medium in enumerate(self.media):
            start = _find(token_ids, medium.token_ids, start)
            if start < 0:
                problem = f"the tokens of medium {number} are not in the prompt"
                raise InvalidRequestError(_field_name(medium.kind), problem)
            stop = start + len(medium.token_ids)
            spans.append(MediaSpan(start, stop, medium.digest, medium.inputs))
            start = stop
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """What a request says, with its media in their places.

    Attributes:
        messages: The conversation; empty for a raw prompt.
        prompt: A raw prompt; empty for a conversation.
        tools: What the model is told that it may call.
        media: What was prepared, in the order of the request.
        snippets: What stands for a medium of each kind before it is expanded.
    """

    messages: Sequence[Message]
    prompt: str
    tools: Sequence[Tool] = ()
    media: Sequence[PreparedMedium] = ()
    snippets: Mapping[MediaKind, str] | None = None

    def expand(self, text: str) -> Expanded:
        """Write out what a template wrote for media; a text may hold fewer than the request."""
        if not self.media or not self.snippets:
            return Expanded(text)
        queues = {kind: [m for m in self.media if m.kind is kind] for kind in self.snippets}
        kinds = {snippet: kind for kind, snippet in self.snippets.items()}
        shown: list[PreparedMedium] = []

        def written_out(match: re.Match[str]) -> str:
            queue = queues[kinds[match.group()]]
            if not queue:
                return match.group()
            shown.append(queue.pop(0))
            return shown[-1].text

        expanded = re.sub("|".join(map(re.escape, kinds)), written_out, text)
        return Expanded(expanded, shown)

    def expand_all(self, text: str) -> Expanded:
        """Write out all media.

        Raises:
            InvalidRequestError: The template has left one out.
        """
        expanded = self.expand(text)
        if len(expanded.media) < len(self.media):
            shown = f"{len(expanded.media)} of {len(self.media)} media"
            problem = f"this model's chat template has a place for {shown} in this conversation"
            raise InvalidRequestError(_field_name(self.media[-1].kind), problem)
        return expanded


def media_prompt(call: GenerationCall, model: LoadedModel) -> MediaPrompt:
    """Decode the media of a request and give them their places; may take a second.

    Raises:
        InvalidRequestError: One cannot be read or has no place, or the model takes none of its
            kind.
        UnsupportedError: It takes a library that is not installed.
        AbandonedError: Nobody waits for it any more.
    """
    if not call.media:
        return MediaPrompt(call.messages, call.prompt, call.shown_tools)
    processor = model.media
    if processor is None:
        raise InvalidRequestError(call.media[0].field, "the loaded model reads text only")
    prepared = [_prepared(medium, processor) for medium in call.media]
    snippets = processor.snippets
    if not call.messages:
        text = _raw_prompt(call.prompt, prepared, snippets)
        return MediaPrompt((), text, media=prepared, snippets=snippets)
    marks = [mark for medium in prepared for mark in medium.marks]
    # The marks first: they may be parts of the snippets.
    placeholders = Placeholders([*marks, *snippets.values()])
    placed = _placed(call.messages, prepared, model)
    harmless = [placeholders.disarmed_message(message) for message in placed]
    tools = [placeholders.disarmed_tool(tool) for tool in call.shown_tools]
    if not processor.takes_parts:
        harmless = [_written_out(message, snippets) for message in harmless]
    return MediaPrompt(harmless, "", tools, prepared, snippets)


def _prepared(medium: Medium, processor: MediaProcessor) -> PreparedMedium:
    require_wanted()
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
    """Return a prompt with snippets in the place of markers.

    A text in the model's own words may hold the snippets already; one with neither gets them at
    its beginning.

    Raises:
        InvalidRequestError: It holds more or fewer.
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
    # Decoding begins with a token of text.
    return text + "\n" if text.endswith(tuple(snippets)) else text


def _placed(
    messages: Sequence[Message], prepared: Sequence[PreparedMedium], model: LoadedModel
) -> list[Message]:
    """Give every medium a message: where markers stand, else where it is known to belong."""
    kinds = [medium.kind for medium in prepared]
    markers = sum(message.content.count(MEDIA_MARKER) for message in messages)
    if markers:
        if markers != len(kinds):
            problem = f"hold {markers} media markers for {len(kinds)} media"
            raise InvalidRequestError("Messages", problem)
        queue = iter(kinds)
        return [_with_markers(message, queue) for message in messages]
    digests = {kind: [m.digest for m in prepared if m.kind is kind] for kind in MediaKind}
    counts = placements_of(model).place(messages, digests)
    return [
        replace(
            message,
            media=tuple(Placement(0, kind) for kind, n in count.items() for _ in range(n)),
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


def _written_out(message: Message, texts: Mapping[MediaKind, str]) -> Message:
    """Put texts into the content where media are placed."""
    pieces, start = [], 0
    for placed in message.media:
        pieces += [message.content[start : placed.offset], texts[placed.kind]]
        start = placed.offset
    return replace(message, content="".join(pieces) + message.content[start:], media=())


def _field_name(kind: MediaKind) -> str:
    return f"{kind.value.capitalize()}s"


def _find(token_ids: Sequence[int], wanted: Sequence[int], start: int) -> int:
    """Return where a run of tokens begins, or -1."""
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
