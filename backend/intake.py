"""What every pipeline asks of a request before it gives it to the engine."""

from collections.abc import Sequence
from typing import Protocol, assert_never

from backend.config import ModelOptions, TuningOptions
from backend.core.embedding import Embedding, EmbeddingRequest
from backend.core.model import ModelKind
from backend.core.scoring import JudgeRequest, ScoreRequest
from backend.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotLoadedError,
    RequestCancelledError,
    UnsupportedError,
)
from backend.model.loaded import LoadedModel


class SideEngine(Protocol):
    """What the pipelines beside generation need of an engine."""

    @property
    def model(self) -> LoadedModel | None:
        """The loaded model, or `None`."""

    @property
    def options(self) -> ModelOptions | None:
        """What it was loaded with, or `None`."""

    async def embed(self, request: EmbeddingRequest) -> Embedding:
        """Return an embedding; cancel to leave."""

    async def score(self, request: ScoreRequest) -> tuple[tuple[float, ...], ...]:
        """Return the log-probability of every token of every continuation; cancel to leave."""

    async def judge(self, request: JudgeRequest) -> tuple[float, ...]:
        """Return a cross-encoder's logit of every pair; cancel to leave."""


def loaded(engine: SideEngine) -> tuple[LoadedModel, TuningOptions]:
    """Return the loaded model and its options.

    Raises:
        ModelNotLoadedError: There is none.
    """
    if engine.model is None or engine.options is None:
        raise ModelNotLoadedError
    return engine.model, engine.options.tuning


def require_same(prepared_for: LoadedModel, now: LoadedModel | None) -> None:
    """Refuse work that was prepared for a model in whose place another one has been loaded.

    To be called right before the work is given to the engine.

    Raises:
        RequestCancelledError: Its tokens mean something else to the model that is loaded now.
    """
    if now is not None and now is not prepared_for:
        raise RequestCancelledError("another model was loaded while the request was prepared")


def require_decoder(call: str, model: LoadedModel) -> None:
    """Refuse a call that only a decoder can answer, with what the loaded model does instead.

    Raises:
        UnsupportedError: The model is of another kind.
    """
    match kind := model.card.kind:
        case ModelKind.DECODER:
            return
        case ModelKind.ENCODER:
            nature = "an encoder: it embeds"
        case ModelKind.CROSS_ENCODER:
            nature = "a cross-encoder: it reranks"
        case _:
            assert_never(kind)
    raise UnsupportedError(f"{call}: {model.card.name} is {nature}")


def require_ids(field: str, token_ids: Sequence[int], model: LoadedModel) -> None:
    """Refuse ids that are outside the vocabulary."""
    limit = model.card.vocab_size
    if wrong := [token_id for token_id in token_ids if not 0 <= token_id < limit]:
        raise InvalidRequestError(
            field, f"token id {wrong[0]} is outside the vocabulary of {limit} tokens"
        )


def require_fit(field: str, token_ids: Sequence[int], model: LoadedModel) -> None:
    """Refuse what is longer than the context, with both numbers."""
    limit = model.card.context_length
    if limit is not None and len(token_ids) > limit:
        raise ContextLengthError(
            field, f"{len(token_ids)} tokens do not fit the context of {limit} tokens"
        )


def require_possible_fit(field: str, text: str, model: LoadedModel) -> None:
    """Refuse a text that cannot fit before it is tokenised: that could take seconds."""
    if model.card.kind is not ModelKind.DECODER:
        # Their tokenizers drop spaces, and make one token of a long word that is unknown.
        return
    limit = model.card.context_length
    least = len(text) // max(model.tokenizer.longest_piece_bytes, 1)
    if limit is not None and least > limit:
        raise ContextLengthError(
            field, f"at least {least} tokens do not fit the context of {limit} tokens"
        )
