"""Checks that a request fits the loaded model, before any work is done for it."""

from collections.abc import Sequence
from typing import assert_never

from backend.core.model import ModelKind
from backend.core.request import GenerationCall
from backend.errors import InvalidRequestError, UnsupportedError
from backend.pipeline.served_model import ServedModel


def require_decoder(call: str, model: ServedModel) -> None:
    """Refuse a call that needs a decoder; the error names the model's kind.

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
        case ModelKind.TAGGER:
            nature = "a token classifier: it finds entities"
        case _:
            assert_never(kind)
    raise UnsupportedError(f"{call}: {model.card.name} is {nature}")


def require_generation(call: GenerationCall, model: ServedModel) -> None:
    """Refuse a call that the loaded model cannot reply to.

    Raises:
        InvalidRequestError: The call biases a token outside the vocabulary.
        UnsupportedError: The model does not generate text.
    """
    require_decoder("Predict", model)
    require_ids("LogitBias", tuple(call.params.sampling.logit_bias), model)


def require_ids(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    """Refuse token ids outside the vocabulary."""
    limit = model.card.vocab_size
    if wrong := [token_id for token_id in token_ids if not 0 <= token_id < limit]:
        raise InvalidRequestError(
            field, f"token id {wrong[0]} is outside the vocabulary of {limit} tokens"
        )
