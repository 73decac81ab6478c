"""Checks of a call against the model: its abilities, ids and context length."""

from collections.abc import Sequence
from typing import assert_never

from backend.config import MAX_CHARS_PER_TOKEN, MAX_TOKEN_IDS
from backend.core.model import ModelKind
from backend.core.request import GenerationCall
from backend.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from backend.pipeline.served_model import ServedModel


def require_fit(
    field: str, token_ids: Sequence[int], model: ServedModel, *, reply_tokens: int = 0
) -> None:
    """Refuse tokens that do not fit the context together with a reply of `reply_tokens`."""
    limit, count = model.card.context_length, len(token_ids)
    if limit is None or count + reply_tokens <= limit:
        return
    problem = "do not fit" if count > limit else "leave no room for a reply in"
    raise ContextLengthError(field, f"{count} tokens {problem} the context of {limit} tokens")


def require_bounded(field: str, text: str, model: ServedModel) -> None:
    """Refuse a text that no context can hold, before spending minutes on tokenising it.

    Raises:
        InvalidRequestError: Its message gives both numbers.
    """
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
            raise ContextLengthError(
                field, f"at least {least} tokens do not fit the context of {limit} tokens"
            )
    require_bounded(field, text, model)


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
