"""A call to the prompt of a model: its media placed, its text rendered, its tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, assert_never

from msgspec import structs

from backend.core.prompt import MEDIA_MARKER, MediaKind, Placement, PreparedMedium, Prompt
from backend.core.request import GenerationCall
from backend.errors import InvalidRequestError
from backend.media.decode import DecodedAudio, DecodedImage, DecodedVideo
from backend.media.decoder_pool import decode_apart
from backend.model.text.guard import Disarmer, unguarded
from backend.model.text.prefix import TokenizedText, branches
from backend.model.text.template import up_to_open_end, with_open_end, written_out
from backend.model.vision.media_processor import (
    LostMediumError,
    ProcessorError,
    as_processed,
    film,
    find_spans,
)
from backend.pipeline.served_model import (
    ServedModel,
    require_bounded,
    require_ids,
    require_possible_fit,
    require_room,
    tokenised_as,
)
from common.rpc import require_caller

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from backend.core.model import ModelCard
    from backend.core.prompt import MediaSpan, Medium, Message, Tool
    from backend.media.decode import Decoded
    from backend.model.vision.media_processor import Content, MediaPreparer

# An invisible character of zero width.
_WORD_JOINER = "\u2060"

log = logging.getLogger(__name__)


class Placeholders(Disarmer):
    """The texts that represent media, or parts of them, in a model's prompts."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Compile the texts; each part precedes the texts that contain it."""
        self._texts = tuple(dict.fromkeys(texts))

    def disarmed(self, text: str) -> str:
        """Return the text with every placeholder broken by an invisible character."""
        for placeholder in self._texts:
            text = text.replace(placeholder, placeholder[0] + _WORD_JOINER + placeholder[1:])
        return text


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The media of one prompt, and the snippets that represent them in its text."""

    prepared: Sequence[PreparedMedium] = ()
    snippets: Mapping[MediaKind, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """The text of a request, with its media placed.

    Attributes:
        messages: The conversation; empty for a raw prompt.
        prompt: A raw prompt; empty for a conversation.
    """

    messages: Sequence[Message]
    prompt: str
    tools: Sequence[Tool] = ()
    media: PlacedMedia = field(default_factory=PlacedMedia)


def media_prompt(call: GenerationCall, model: ServedModel) -> MediaPrompt:
    """Decode, prepare and place the media of a request; may take a second.

    Raises:
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
    decoded = decode_apart(medium, sampling_rate=processor.sampling_rate)
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
        structs.replace(
            message, media=tuple(Placement(0, kind) for kind, n in count.items() for _ in range(n))
        )
        for message, count in zip(messages, counts, strict=True)
    ]


def _with_markers(message: Message, kinds: Iterator[MediaKind]) -> Message:
    parts = message.content.split(MEDIA_MARKER)
    offset, media = 0, []
    for part in parts[:-1]:
        offset += len(part)
        media.append(Placement(offset, next(kinds)))
    return structs.replace(message, content="".join(parts), media=tuple(media))


TAIL_CHARS = 4000


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """A prompt as text, with snippets for its media, and guards in callers' marks.

    Attributes:
        branches: Texts of prompts that later requests may bring. The first shares only the system
            prompt, the second, if any, asks something after the reply; one refused by the template
            is empty.
        is_raw: Whether the caller wrote the text, rather than a template.
    """

    text: str
    branches: Sequence[str] = ()
    is_raw: bool = False

    @property
    def field(self) -> str:
        """The request field that the text comes from."""
        return "Prompt" if self.is_raw else "Messages"


@dataclass(frozen=True, slots=True)
class _Expanded:
    """A text with its media expanded to tokens, and these media in text order."""

    text: str
    media: Sequence[PreparedMedium]


def tokenize(written: WrittenPrompt, media: PlacedMedia, model: ServedModel) -> Prompt:
    """Return the tokens of a prompt, with its media and boundaries located."""
    expanded = _expand_all(written.text, media)
    require_possible_fit(written.field, unguarded(expanded.text), model)
    with tokenised_as(written.field):
        token_ids = _encode(expanded.text, model, is_raw=written.is_raw)
    if not token_ids:
        raise InvalidRequestError(written.field, "is empty")
    require_room(written.field, len(token_ids), model, reply_tokens=1)
    token_ids = list(token_ids)
    spans = _spans(token_ids, expanded.media)
    require_ids(written.field, _beside(spans, token_ids), model)
    later = [_expand(branch, media).text for branch in written.branches]
    shared = _shared_tokens(expanded.text, token_ids, later, model)
    system_tokens, next_question = [*shared, 0, 0][:2]
    # Another question about the same picture branches off after it.
    boundaries = {*shared, *(span.stop for span in spans)}
    return Prompt(
        token_ids=tuple(token_ids),
        tail=unguarded(written.text)[-TAIL_CHARS:],
        boundaries=tuple(sorted(boundaries - {0})),
        next_question=next_question,
        system_tokens=system_tokens,
        media=spans,
    )


def plain_token_ids(field: str, text: str, media: PlacedMedia, model: ServedModel) -> Sequence[int]:
    """Return the tokens of a text with its media, without special tokens.

    The result may exceed the context.
    """
    expanded = _expand_all(text, media)
    require_bounded(field, unguarded(expanded.text), model)
    with tokenised_as(field):
        return model.tokenizer.encode_packed(expanded.text, adds_special=False)


def _encode(text: str, model: ServedModel, *, is_raw: bool) -> Sequence[int]:
    """Return the tokens of a text; raw text gets the BOS token that a template would write."""
    if is_raw:
        return model.tokenizer.encode_prompt_packed(text)
    return model.tokenizer.encode_packed(text, adds_special=False)


def _expand_all(text: str, media: PlacedMedia) -> _Expanded:
    expanded = _expand(text, media)
    if len(expanded.media) < len(media.prepared):
        shown = f"{len(expanded.media)} of {len(media.prepared)} media"
        problem = f"this model's chat template has a place for {shown} in this conversation"
        raise InvalidRequestError(_field_name(media.prepared[-1].kind), problem)
    return expanded


def _expand(text: str, media: PlacedMedia) -> _Expanded:
    """Expand the media whose snippets occur in the text, perhaps not all of the request's."""
    if not media.prepared:
        return _Expanded(text, ())
    queues = {kind: [m for m in media.prepared if m.kind is kind] for kind in media.snippets}
    kinds = {snippet: kind for kind, snippet in media.snippets.items()}
    shown: list[PreparedMedium] = []

    def written_out(match: re.Match[str]) -> str:
        queue = queues[kinds[match.group()]]
        if not queue:
            return match.group()
        shown.append(queue.pop(0))
        return shown[-1].text

    expanded = re.sub("|".join(map(re.escape, kinds)), written_out, text)
    return _Expanded(as_processed(expanded, media.prepared), shown)


def _spans(token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
    """Locate media in the tokens of a text that contains them in this order."""
    try:
        return find_spans(token_ids, media)
    except LostMediumError as error:
        field = _field_name(media[error.number].kind)
        raise InvalidRequestError(field, str(error)) from error


def _beside(spans: Sequence[MediaSpan], token_ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens without those of media, which may be outside the vocabulary."""
    if not spans:
        return token_ids
    starts, stops = [0, *(span.stop for span in spans)], [*(span.start for span in spans), None]
    parts = (token_ids[start:stop] for start, stop in zip(starts, stops, strict=True))
    return list(chain.from_iterable(parts))


def _shared_tokens(
    text: str, token_ids: Sequence[int], branches: Sequence[str], model: ServedModel
) -> list[int]:
    """Return the length in tokens of the prefix shared with each branch; 0 if it is all of them."""
    if not branches:
        return []
    prompt = TokenizedText(text, token_ids, model.tokenizer)
    shared = [prompt.shared_tokens(branch) if branch else 0 for branch in branches]
    return [tokens if tokens < len(token_ids) else 0 for tokens in shared]


def _field_name(kind: MediaKind) -> str:
    return f"{kind.value.capitalize()}s"


def render(call: GenerationCall, model: ServedModel) -> Prompt:
    """Turn messages or raw text, and media, into the tokens of a prompt.

    Slow: call it on a worker thread.
    """
    placed = media_prompt(call, model)
    written = _write(call, placed, model)
    if call.debug:
        log.info("request id=%s prompt=%r", call.request_id, unguarded(written.text))
    prompt = tokenize(written, placed.media, model)
    public_tokens = prompt.system_tokens if call.shares_system_prompt else 0
    return replace(prompt, scope=call.cache_scope, public_tokens=public_tokens)


def token_ids_of(call: GenerationCall, model: ServedModel) -> Sequence[int]:
    """Return the ids of a rendered conversation, or of raw text without special tokens.

    The result may exceed the context: callers use it to find out. Media count if the model
    takes them.
    """
    placed = media_prompt(call if model.media else replace(call, media=()), model)
    if not placed.messages:
        return plain_token_ids("Prompt", placed.prompt, placed.media, model)
    written = _write(call, placed, model, has_branches=False)
    return plain_token_ids("Messages", written.text, placed.media, model)


def _write(
    call: GenerationCall, placed: MediaPrompt, model: ServedModel, *, has_branches: bool = True
) -> WrittenPrompt:
    """Write a prompt and its branches; raw text has none."""
    if not placed.messages:
        return WrittenPrompt(placed.prompt, is_raw=True)
    options, shown = model.guard.options(call.template_options), placed.messages
    later = branches(shown, placed.tools, model.card.reuse) if has_branches else ()
    messages = with_open_end(shown) if call.continues else shown
    text, others = model.template.render_with_branches(messages, later, placed.tools, options)
    return WrittenPrompt(up_to_open_end(text) if call.continues else text, others)
