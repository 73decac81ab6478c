"""What a call says, as the tokens that the model reads."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from backend.core.prompt import Prompt
from backend.core.request import GenerationCall
from backend.errors import ContextLengthError, InvalidRequestError
from backend.intake import require_possible_fit
from backend.media_prompt import MediaPrompt, media_prompt
from backend.model.boundaries import Boundaries, find_boundaries
from backend.model.loaded import LoadedModel
from backend.model.prefix import TokenizedText

PROMPT_TAIL_CHARS = 4000

log = logging.getLogger(__name__)


def render(call: GenerationCall, model: LoadedModel) -> Prompt:
    """Turn messages, or raw text, and media into the tokens that the model reads.

    Takes a while: not for the event loop.

    Raises:
        InvalidRequestError: The template cannot render this, a medium cannot be read or has no
            place, or nothing is left to read.
        ContextLengthError: The prompt leaves no room for a reply.
    """
    shown = media_prompt(call, model)
    text = _text(call, shown, model)
    if call.debug:
        log.info("request id=%s prompt=%r", call.request_id, text)
    expanded = shown.expand_all(text)
    field_name = "Messages" if call.messages else "Prompt"
    require_possible_fit(field_name, expanded.text, model)
    if call.messages:
        token_ids = model.tokenizer.encode(expanded.text, adds_special=False)
    else:
        token_ids = model.tokenizer.encode_prompt(expanded.text)
    if not token_ids:
        raise InvalidRequestError(field_name, "is empty")
    if (limit := model.card.context_length) is not None and len(token_ids) >= limit:
        raise ContextLengthError(
            field_name, f"{len(token_ids)} tokens do not fit the context of {limit} tokens"
        )
    tokenized = TokenizedText(expanded.text, token_ids, model.tokenizer)
    found = _boundaries(call, shown, model, tokenized)
    spans = expanded.spans(token_ids)
    return Prompt(
        token_ids=tuple(token_ids),
        tail=text[-PROMPT_TAIL_CHARS:],
        # Another question about the same picture begins behind it.
        boundaries=tuple(sorted({*found.positions, *(span.stop for span in spans)})),
        system_tokens=found.system_tokens,
        media=spans,
    )


def token_ids_of(call: GenerationCall, model: LoadedModel) -> Sequence[int]:
    """Return the ids of a rendered conversation, or of raw text without special tokens.

    They may be more than the context holds: that is what a caller may want to know. Media count
    for a model that takes them.

    Raises:
        InvalidRequestError: The template cannot render this.
    """
    shown = media_prompt(call if model.media else replace(call, media=()), model)
    text = shown.expand_all(_text(call, shown, model)).text
    return model.tokenizer.encode(text, adds_special=False)


def _text(call: GenerationCall, shown: MediaPrompt, model: LoadedModel) -> str:
    if not shown.messages:
        return shown.prompt
    return model.template.render(shown.messages, shown.tools, call.template_options)


def _boundaries(
    call: GenerationCall, shown: MediaPrompt, model: LoadedModel, text: TokenizedText
) -> Boundaries:
    """Find where later requests will branch off; nothing is known of those that send raw text."""
    if not shown.messages:
        return Boundaries()
    tools, options = shown.tools, call.template_options
    return find_boundaries(
        shown.messages,
        tools,
        lambda messages: shown.expand(model.template.render(messages, tools, options)).text,
        text,
        system_only=not model.card.reuses_at_boundaries_only,
    )
