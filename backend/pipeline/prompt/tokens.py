"""Turns the text of a prompt into tokens: expands media, encodes text, locates media."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.core.prompt import Prompt
from backend.errors import InvalidRequestError
from backend.model.text.guard import unguarded
from backend.model.text.prefix import TokenizedText
from backend.model.vision.media_processor import LostMediumError, as_processed, find_spans
from backend.pipeline.validation import require_bounded, require_fit, require_possible_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.core.media import MediaKind, PreparedMedium
    from backend.core.prompt import MediaSpan
    from backend.pipeline.prompt.media_prompt import PlacedMedia
    from backend.pipeline.served_model import ServedModel

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
    """Return the tokens of a prompt, with its media and boundaries located.

    Raises:
        ContextLengthError: The prompt leaves no room for a reply.
        InvalidRequestError: The prompt is empty, or lacks a medium.
    """
    expanded = _expand_all(written.text, media)
    require_possible_fit(written.field, unguarded(expanded.text), model)
    token_ids = _encode(expanded.text, model, is_raw=written.is_raw)
    if not token_ids:
        raise InvalidRequestError(written.field, "is empty")
    require_fit(written.field, token_ids, model, reply_tokens=1)
    spans = _spans(token_ids, expanded.media)
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

    Raises:
        InvalidRequestError: The text of `field` is longer than any context.
    """
    expanded = _expand_all(text, media)
    require_bounded(field, unguarded(expanded.text), model)
    return model.tokenizer.encode(expanded.text, adds_special=False)


def _encode(text: str, model: ServedModel, *, is_raw: bool) -> Sequence[int]:
    """Return the tokens of a text; raw text gets the BOS token that a template would write."""
    if is_raw:
        return model.tokenizer.encode_prompt(text)
    return model.tokenizer.encode(text, adds_special=False)


def _expand_all(text: str, media: PlacedMedia) -> _Expanded:
    """Expand all media.

    Raises:
        InvalidRequestError: The template left a medium out.
    """
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
    """Locate media in the tokens of a text that contains them in this order.

    Raises:
        InvalidRequestError: One of them is missing.
    """
    try:
        return find_spans(token_ids, media)
    except LostMediumError as error:
        field = _field_name(media[error.number].kind)
        raise InvalidRequestError(field, str(error)) from error


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
