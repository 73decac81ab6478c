"""The pipeline of generation: a call to increments. Unary replies fold them."""

import logging
import sys
from collections.abc import AsyncGenerator, Sequence

from backend.core.guide import Guide
from backend.core.model import ModelKind
from backend.core.prompt import Prompt, ToolSchemas
from backend.core.request import GenerationCall, GenerationRequest
from backend.core.step import FinishReason, Increment, Usage
from backend.errors import BackendError
from backend.formats.format import NO_REASONING, NO_TOOLS
from backend.output.reply import (
    ByteDetokenizer,
    Detokenizer,
    ReplyCursor,
    ReplySpec,
    WindowDetokenizer,
)
from backend.output.reply_format import OutputFormat
from backend.pipeline import worker_pool
from backend.pipeline.rendering import render, token_ids_of
from backend.pipeline.request_log import RequestLog
from backend.pipeline.served_model import (
    ServedEngine,
    ServedModel,
    require_generation,
    require_ids,
)
from common.rpc import present_peer

log = logging.getLogger(__name__)


async def generate(
    call: GenerationCall, model: ServedModel, engine: ServedEngine
) -> AsyncGenerator[Increment, None]:
    """Yield a reply in increments; the last one has the finish.

    Closing the iterator cancels the request.
    """
    require_generation(call, model)

    def prepare() -> tuple[Prompt, Guide | None, ToolSchemas]:
        prompt = render(call, model)
        model.constraints.require_callable(call)
        schemas = model.constraints.schemas(call.shown_tools)
        return prompt, model.constraints.guide(call, prompt), schemas

    with engine.preparation(call.request_id):
        prompt, guide, schemas = await worker_pool.run(
            prepare, size_bytes=call.size_bytes, reads_media=bool(call.media)
        )
        request = _request(call, prompt, model, guide)
        cursor = _reply_cursor(call, prompt, schemas, model)
        request_log = RequestLog(call.request_id, Usage(prompt_tokens=len(prompt.token_ids)))
        try:
            stream = engine.submit(model, request)
        except BackendError:
            request_log.fail()
            request_log.close()
            raise
    is_open = True
    try:
        async for steps in stream:
            deltas, finish = cursor.advance(steps)
            usage = request_log.note(steps, cursor.completion_tokens, finish)
            is_open = finish is None
            yield Increment(deltas, usage, finish)
            if finish is not None:
                if finish.reason is FinishReason.TOOL_CALLS:
                    engine.expect(call.request_id)
                return
    except BackendError:
        is_open = False
        request_log.fail()
        raise
    finally:
        engine.cancel(call.request_id)
        if is_open:
            engine.expect(call.request_id, is_again=True)
        request_log.close()


def tell_format(model: ServedModel) -> None:
    """Say how replies are read."""
    if model.card.kind is ModelKind.DECODER:
        log.info("replies of %s are read as %s", model.card.name, _described(model.format))


def _described(reply_format: OutputFormat) -> str:
    """Return a format in words for a log line."""
    tools, reasoning = reply_format.tools, reply_format.reasoning
    calls = "no tool calls" if tools is NO_TOOLS else f"tool calls in {tools.name}"
    thoughts = "no thoughts" if reasoning is NO_REASONING else f"thoughts in {reasoning.name}"
    return f"text with {calls} and {thoughts}"


async def tokenize(call: GenerationCall, model: ServedModel) -> Sequence[int]:
    """Return the token ids of a rendered conversation, or of raw text without special tokens.

    The result may exceed the context: callers use it to find out.
    """
    return await worker_pool.run(
        lambda: token_ids_of(call, model), size_bytes=call.size_bytes, reads_media=bool(call.media)
    )


async def detokenize(token_ids: Sequence[int], model: ServedModel) -> str:
    """Return the text of token ids."""

    def decode() -> str:
        require_ids("tokens", token_ids, model)
        return model.tokenizer.decode(token_ids)

    return await worker_pool.run(decode, size_bytes=worker_pool.BYTES_PER_ID * len(token_ids))


def _request(
    call: GenerationCall, prompt: Prompt, model: ServedModel, guide: Guide | None
) -> GenerationRequest:
    # A grammar ends only at its end token.
    ignores_eos = call.ignore_eos and not (guide and guide.rule)
    room = (model.card.context_length or sys.maxsize) - len(prompt.token_ids)
    return GenerationRequest(
        params=call.params,
        prompt=prompt,
        room=room,
        stop_token_ids=frozenset() if ignores_eos else model.card.eos_token_ids,
        guide=guide,
        caller=present_peer(),
    )


def _reply_cursor(
    call: GenerationCall, prompt: Prompt, schemas: ToolSchemas, model: ServedModel
) -> ReplyCursor:
    detokenizer = _detokenizer(model, continues_text=not call.messages)
    spec = ReplySpec(
        format=model.format,
        tools=schemas,
        stop_strings=call.stop_strings,
        prompt_tail=prompt.tail,
        wants_logprobs=call.params.top_logprobs is not None,
        max_calls=None if call.parallel_tool_calls else 1,
        used_ids=tuple(
            called.call_id for message in call.messages for called in message.tool_calls
        ),
        is_ruled=call.is_ruled,
        triggers=model.card.grammar_triggers,
    )
    return ReplyCursor(spec, detokenizer, model.tokenizer.token_bytes)


def _detokenizer(model: ServedModel, *, continues_text: bool) -> Detokenizer:
    """Return a detokenizer; it keeps the leading space of a continued text."""
    tokenizer, markers = model.tokenizer, model.format.markers
    pieces = tokenizer.visible_pieces(markers)
    if pieces is None:
        return WindowDetokenizer(tokenizer.visible_decoder(markers))
    trims = tokenizer.trims_leading_space and not continues_text
    return ByteDetokenizer(pieces, trims_leading_space=trims)
