"""The one pipeline: a `GenerationCall` becomes increments. A unary reply is their fold."""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from backend.beside import run_beside
from backend.config import ModelOptions, TuningOptions
from backend.core.delta import Increment, Usage
from backend.core.guide import ReplyGrammar
from backend.core.model import ModelKind
from backend.core.prompt import Prompt
from backend.core.request import GenerationCall, GenerationRequest
from backend.core.step import EngineEvent, TokenStep
from backend.errors import (
    BackendError,
    ModelNotLoadedError,
)
from backend.intake import require_decoder, require_ids, require_same
from backend.journal import RequestJournal
from backend.model.loaded import LoadedModel
from backend.output.detection import detect
from backend.output.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from backend.output.evidence import FormatEvidence
from backend.output.format import OutputFormat
from backend.output.reply import ReplyCursor, ReplySpec
from backend.rendering import render, token_ids_of
from backend.structure import structures_of

PROMPT_TAIL_CHARS = 256

log = logging.getLogger(__name__)

_formats: WeakKeyDictionary[LoadedModel, OutputFormat] = WeakKeyDictionary()


class TextEngine(Protocol):
    """What the pipeline needs of an engine."""

    @property
    def model(self) -> LoadedModel | None:
        """The loaded model, or `None`."""

    @property
    def options(self) -> ModelOptions | None:
        """What it was loaded with, or `None`."""

    def submit(self, request: GenerationRequest) -> AsyncIterator[Sequence[EngineEvent]]:
        """Queue a request; what was published since the last look comes together."""

    def cancel(self, request_id: str) -> None:
        """End a request; harmless when it has ended or was never known."""


async def generate(call: GenerationCall, engine: TextEngine) -> AsyncGenerator[Increment, None]:
    """Yield a reply in increments, the last of which has its finish.

    To cancel is to leave: close the iterator and the engine drops the request.

    Raises:
        InvalidRequestError: A field does not fit the loaded model.
        RequestCancelledError: Another model was loaded before the engine had the request.
        UnsupportedError: The model generates no text.
        BackendError: No model, no room, or the engine failed on this request.
    """
    model = _loaded(engine)
    require_decoder("Predict", model)
    wire = output_format(engine)
    structures = structures_of(model)

    def prepare() -> tuple[Prompt, ReplyGrammar | None]:
        prompt = render(call, model)
        return prompt, structures.grammar(call, prompt, wire)

    prompt, grammar = await run_beside(prepare, reads_media=bool(call.media))
    require_same(model, engine.model)
    request = _request(call, prompt, model, grammar)
    cursor = _reply_cursor(call, prompt, model, wire)
    journal = RequestJournal(call.request_id, Usage(prompt_tokens=len(prompt.token_ids)))
    try:
        async for events in engine.submit(request):
            for event in events:
                journal.note(event)
            steps = [event for event in events if isinstance(event, TokenStep)]
            deltas, finish = cursor.feed(steps)
            journal.count(cursor.completion_tokens, finish)
            yield Increment(deltas, journal.usage, finish)
            if finish is not None:
                return
    except BackendError:
        journal.fail()
        raise
    finally:
        engine.cancel(call.request_id)
        journal.close()


async def warm_up(engine: TextEngine) -> None:
    """Do in advance what the first request would wait for, and say how replies will be read."""
    model = engine.model
    if model is not None and model.card.kind is ModelKind.DECODER:
        log.info("replies of %s are read as %s", model.card.name, output_format(engine).name)
        await asyncio.to_thread(structures_of(model).warm_up)


async def tokenize(call: GenerationCall, engine: TextEngine) -> Sequence[int]:
    """Return the token ids of a rendered conversation, or of raw text without special tokens.

    They may be more than the context holds: that is what a caller may want to know.
    """
    model = _loaded(engine)
    return await run_beside(lambda: token_ids_of(call, model), reads_media=bool(call.media))


async def detokenize(token_ids: Sequence[int], engine: TextEngine) -> str:
    """Return the text of token ids.

    Raises:
        InvalidRequestError: An id is outside the vocabulary.
    """
    model = _loaded(engine)
    require_ids("tokens", token_ids, model)
    return await asyncio.to_thread(model.tokenizer.decode, token_ids)


def output_format(engine: TextEngine) -> OutputFormat:
    """Find out, once for a loaded model, how it writes thoughts and tool calls."""
    model = _loaded(engine)
    if (known := _formats.get(model)) is not None:
        return known
    tuning = engine.options.tuning if engine.options else TuningOptions()
    _formats[model] = found = detect(
        FormatEvidence(
            vocabulary=model.tokenizer.vocabulary,
            chat_template=model.template.text,
            tool_parser=tuning.tool_parser,
            reasoning_parser=tuning.reasoning_parser,
        )
    )
    return found


def _loaded(engine: TextEngine) -> LoadedModel:
    if engine.model is None:
        raise ModelNotLoadedError
    return engine.model


def _request(
    call: GenerationCall, prompt: Prompt, model: LoadedModel, grammar: ReplyGrammar | None
) -> GenerationRequest:
    require_ids("LogitBias", list(call.sampling.logit_bias), model)
    # The only way out of a grammar is the token that ends it.
    ignores_eos = call.ignore_eos and grammar is None
    room = (model.card.context_length or sys.maxsize) - len(prompt.token_ids)
    return GenerationRequest(
        request_id=call.request_id,
        prompt=prompt,
        sampling=call.sampling,
        max_tokens=min(call.max_tokens or room, room),
        is_open_ended=call.max_tokens is None or call.max_tokens > room,
        stop_token_ids=frozenset() if ignores_eos else model.card.eos_token_ids,
        top_logprobs=call.top_logprobs,
        grammar=grammar,
        remembered=call.remembered,
        cache_path=call.cache_path,
        priority=call.priority,
    )


def _reply_cursor(
    call: GenerationCall, prompt: Prompt, model: LoadedModel, wire: OutputFormat
) -> ReplyCursor:
    spec = ReplySpec(
        format=wire,
        tools={tool.name: tool.parameters for tool in call.shown_tools},
        stop_strings=call.stop_strings,
        prompt_tail=prompt.tail,
        wants_logprobs=call.top_logprobs is not None,
    )
    detokenizer = _detokenizer(model, wire.markers, continues_text=not call.messages)
    return ReplyCursor(spec, detokenizer, model.tokenizer.token_bytes)


def _detokenizer(
    model: LoadedModel, markers: frozenset[str], *, continues_text: bool
) -> Detokenizer:
    """Make a detokenizer; a space that begins the continuation of a text belongs to it."""
    tokenizer = model.tokenizer
    pieces = tokenizer.visible_pieces(markers)
    if pieces is None:
        return WindowDetokenizer(tokenizer.visible_decoder(markers))
    trims = tokenizer.trims_leading_space and not continues_text
    return ByteDetokenizer(pieces, trims_leading_space=trims)
