"""Renders a call to its prompt: places media, writes the text, encodes it."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from backend.core.prompt import Prompt
from backend.core.request import GenerationCall
from backend.model.text.guard import unguarded
from backend.model.text.prefix import branches
from backend.pipeline.prompt.media_prompt import MediaPrompt, media_prompt
from backend.pipeline.prompt.tokens import WrittenPrompt, plain_token_ids, tokenize
from backend.pipeline.served_model import ServedModel

log = logging.getLogger(__name__)


def render(call: GenerationCall, model: ServedModel) -> Prompt:
    """Turn messages or raw text, and media, into the tokens of a prompt.

    Slow: call it on a worker thread.

    Raises:
        InvalidRequestError: The template refuses the conversation, a medium cannot be read or has
            no place, or the prompt is empty.
        ContextLengthError: The prompt leaves no room for a reply.
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

    Raises:
        InvalidRequestError: The template refuses the conversation.
    """
    placed = media_prompt(call if model.media else replace(call, media=()), model)
    if not placed.messages:
        return plain_token_ids("Prompt", placed.prompt, placed.media, model)
    options = model.guard.options(call.template_options)
    text = model.template.render(placed.messages, placed.tools, options)
    return plain_token_ids("Messages", text, placed.media, model)


def _write(call: GenerationCall, placed: MediaPrompt, model: ServedModel) -> WrittenPrompt:
    """Write a prompt and its branches; raw text has none."""
    if not placed.messages:
        return WrittenPrompt(placed.prompt, is_raw=True)
    options = model.guard.options(call.template_options)
    later = branches(placed.messages, placed.tools, model.card.reuse)
    texts = model.template.render_with_branches(placed.messages, later, placed.tools, options)
    return WrittenPrompt(*texts)
