"""A loaded model with everything derived from it at load, and the checks of a call against it."""

from __future__ import annotations

import logging
from asyncio import Semaphore
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from backend.config import MAX_CHARS_PER_TOKEN, MAX_TOKEN_IDS, MAX_TRANSCRIPTIONS
from backend.core.model import ModelKind
from backend.core.prompt import new_scope
from backend.core.request import GenerationCall
from backend.engine.engine import Engine
from backend.errors import (
    TEXT_FIELD,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedError,
)
from backend.formats.format import FormatEvidence
from backend.formats.registry import TASK_MARKS, TURN_STARTS
from backend.model.text.guard import NO_GUARD, Guard, Marks
from backend.output.detection import detect, spelling_of
from backend.pipeline.constraints import Constraints
from backend.pipeline.media_placement import PlacementMemory

if TYPE_CHECKING:
    from backend.config import ModelOptions, TuningOptions
    from backend.core.model import ModelCard
    from backend.model.loaded import LoadedModel
    from backend.model.text.template import ChatTemplate
    from backend.model.text.tokenizer import Tokenizer
    from backend.model.vision.media_processor import MediaPreparer
    from backend.output.reply_format import OutputFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServedModel:
    """A model as requests see it, made once at the end of its load; thread-safe.

    It is also the handle that the engine requires with all work. A request takes it first and
    passes it on, so that tokens of one model never reach its successor.

    Attributes:
        media: Prepares images, sounds and videos; `None` for a text-only model.
        format: How the model writes thoughts and tool calls.
        guard: Keeps control tokens out of callers' texts.
        placements: Remembers which message has which media.
        transcriptions: Limits concurrent transcriptions, whose recordings are large.
    """

    options: ModelOptions
    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    media: MediaPreparer | None
    format: OutputFormat
    constraints: Constraints
    guard: Guard = NO_GUARD
    placements: PlacementMemory = field(default_factory=PlacementMemory)
    transcriptions: Semaphore = field(default_factory=lambda: Semaphore(MAX_TRANSCRIPTIONS))

    @classmethod
    def of(cls, loaded: LoadedModel, options: ModelOptions) -> ServedModel:
        """Derive a served model from a loaded one and its load options."""
        if loaded.template.writes_tools and loaded.card.kind is ModelKind.DECODER:
            log.info(
                "the chat template of %s knows no tools: they are written into the system prompt "
                "(option write_tools:false leaves them out)",
                loaded.card.name,
            )
        evidence = FormatEvidence(
            vocabulary=loaded.tokenizer.vocabulary,
            chat_template=loaded.template.text,
            written_call=loaded.template.written_call,
            is_told_here=loaded.template.writes_tools,
            tool_parser=options.tuning.text.tool_parser,
            reasoning_parser=options.tuning.text.reasoning_parser,
        )
        output_format = detect(evidence)
        if spelling := spelling_of(output_format.tools, evidence.has):
            loaded.template.spell_calls(spelling)
        if options.tuning.text.calls_in_thoughts == "call":
            output_format = output_format.without_drafts()
        return cls(
            options=options,
            card=loaded.card,
            tokenizer=loaded.tokenizer,
            template=loaded.template,
            media=loaded.media,
            format=output_format,
            constraints=Constraints(loaded.tokenizer, loaded.card, output_format),
            guard=_guard(loaded, output_format, options),
            placements=PlacementMemory(options.tuning.prompt_cache.cache_dir),
        )

    @property
    def tuning(self) -> TuningOptions:
        """Tuning options that the model was loaded with."""
        return self.options.tuning

    def own_scope(self) -> str:
        """Return the prompt cache scope for a call without a field for it."""
        return new_scope() if self.tuning.prompt_cache.cache_sharing == "none" else ""


def _guard(loaded: LoadedModel, output_format: OutputFormat, options: ModelOptions) -> Guard:
    """Return the guard of a model's prompts, or one that does nothing if callers are trusted."""
    if options.tuning.text.control_tokens == "trusted":
        return NO_GUARD
    tokenizer, reasoning, tools = loaded.tokenizer, output_format.reasoning, output_format.tools
    shown = {text for text in tokenizer.added_texts.values() if text in loaded.template.text}
    marks = {*tokenizer.special_texts.values(), *shown, *output_format.markers, *TURN_STARTS}
    # Added tokens such as Gemma's <table> are words.
    marks = {text for text in marks & set(tokenizer.added_texts.values()) if len(text.strip()) > 1}
    if loaded.media is not None:
        marks -= TASK_MARKS
    turns = {*TURN_STARTS, *(tokenizer.added_texts.get(i) for i in loaded.card.eos_token_ids)}
    own = {*reasoning.starts, *reasoning.ends, *reasoning.frames, *tools.openers, *tools.closers}
    return Guard(
        Marks(marks, tokenizer.normalized), Marks(marks - (own - turns), tokenizer.normalized)
    )


ServedEngine: TypeAlias = Engine[ServedModel]


def require_fit(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    """Refuse tokens of a text that do not fit the context, or are unknown to the model."""
    require_room(field, len(token_ids), model)
    require_ids(field, token_ids, model)


def require_room(field: str, count: int, model: ServedModel, *, reply_tokens: int = 0) -> None:
    """Refuse `count` tokens that do not fit the context together with a reply."""
    limit = model.card.context_length
    if limit is None or count + reply_tokens <= limit:
        return
    problem = "do not fit" if count > limit else "leave no room for a reply"
    raise ContextLengthError.beyond(field, f"{count} tokens {problem}", limit)


def require_bounded(field: str, text: str, model: ServedModel) -> None:
    """Refuse a text that no context can hold, before spending minutes on tokenising it."""
    limit = MAX_CHARS_PER_TOKEN * max(model.card.context_length or 0, MAX_TOKEN_IDS)
    if len(text) > limit:
        raise InvalidRequestError(
            field, f"holds {len(text)} characters; texts of at most {limit} are tokenised"
        )


def require_possible_fit(field: str, text: str, model: ServedModel) -> None:
    """Refuse a text that cannot fit, before spending seconds on tokenising it."""
    limit = model.card.context_length
    # Encoders' tokenizers drop spaces, and turn a long unknown word into one token.
    if limit is not None and model.card.kind is ModelKind.DECODER:
        least = len(text) // max(model.tokenizer.longest_piece_bytes, 1)
        if least > limit:
            raise ContextLengthError.beyond(field, f"at least {least} tokens do not fit", limit)
    require_bounded(field, text, model)


@contextmanager
def tokenised_as(field: str) -> Iterator[None]:
    """Name the field of a text that cannot be tokenised; the tokenizer takes all for prompts."""
    try:
        yield
    except InvalidRequestError as error:
        if error.field != TEXT_FIELD:
            raise
        raise InvalidRequestError(field, error.problem) from error


def require_decoder(call: str, model: ServedModel) -> None:
    """Refuse a call that needs a decoder; the error names the model's kind."""
    if (kind := model.card.kind) is not ModelKind.DECODER:
        raise UnsupportedError(f"{call}: {model.card.name} is {kind.nature}")


def require_generation(call: GenerationCall, model: ServedModel) -> None:
    """Refuse a call that the loaded model cannot reply to."""
    require_decoder("Predict", model)
    require_ids("LogitBias", tuple(call.params.sampling.logit_bias), model)


def require_ids(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    """Refuse token ids outside the vocabulary, those of texts too.

    A tokenizer may know tokens that the model lacks; MLX then reads memory after its weights.
    """
    limit = model.card.vocab_size
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < limit:
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limit)
    problem = f"token id {wrong} is outside the vocabulary of {limit} tokens"
    raise InvalidRequestError(field, problem)
