"""The pipeline of Embedding: text or token ids to vectors."""

import logging
import time
from functools import partial

from backend.config import MAX_TOKEN_IDS
from backend.core.embedding import Embedding, EmbeddingCall, EmbeddingRequest, Pooling
from backend.errors import InvalidRequestError, UnsupportedError
from backend.pipeline import worker_pool
from backend.pipeline.served_model import ComputeEngine, ServedModel
from backend.pipeline.validation import (
    require_bounded,
    require_fit,
    require_ids,
    require_possible_fit,
)

BYTES_PER_ID = 8

log = logging.getLogger(__name__)


async def embed(call: EmbeddingCall, model: ServedModel, engine: ComputeEngine) -> Embedding:
    """Return the vector of a text, or of each token with `pooling:none`.

    Raises:
        InvalidRequestError: The input is empty or too long, or an id is outside the vocabulary.
        RequestCancelledError: Another model has replaced this one.
        UnsupportedError: The model has no embeddings; the message says why.
    """
    started = time.monotonic()
    options = model.tuning.retrieval
    profile = model.card.embedding
    if profile.obstacle:
        raise UnsupportedError(f"Embedding: {profile.obstacle}")
    token_ids = await worker_pool.run(
        partial(_token_ids, call, model, truncates=options.truncate),
        size_bytes=len(call.text) + BYTES_PER_ID * len(call.token_ids),
    )
    pooling = Pooling(options.pooling) if options.pooling else profile.pooling
    request = EmbeddingRequest(
        token_ids=tuple(token_ids),
        pooling=pooling,
        is_normalized=profile.is_normalized and pooling is not Pooling.NONE,
    )
    embedding = await engine.compute(model, request)
    seconds = time.monotonic() - started
    log.info("embedding prompt_tokens=%d ms=%.0f", len(token_ids), seconds * 1000.0)
    return embedding


def _token_ids(call: EmbeddingCall, model: ServedModel, *, truncates: bool) -> list[int]:
    """Return the token ids; a text gets the tokenizer's special tokens."""
    if not call.text:
        require_ids("EmbeddingTokens", call.token_ids, model)
        token_ids = list(call.token_ids)
        if truncates:
            return token_ids[: model.card.context_length]
        require_fit("EmbeddingTokens", token_ids, model)
        return token_ids
    if truncates:
        token_ids = _truncated(call.text, model)
    else:
        require_possible_fit("Embeddings", call.text, model)
        token_ids = model.tokenizer.encode(call.text, adds_special=True)
    if not token_ids:
        raise InvalidRequestError("Embeddings", "is empty")
    if len(token_ids) > MAX_TOKEN_IDS:
        problem = f"holds {len(token_ids)} tokens, at most {MAX_TOKEN_IDS} are allowed"
        raise InvalidRequestError("Embeddings", problem)
    require_fit("Embeddings", token_ids, model)
    return token_ids


def _truncated(text: str, model: ServedModel) -> list[int]:
    """Return as many tokens of a text as fit, with the special tokens around them."""
    limit = model.card.context_length
    if limit is None:
        require_bounded("Embeddings", text, model)
        return model.tokenizer.encode(text, adds_special=True)
    # Cut text far beyond the limit before tokenising it.
    text = text[: 2 * limit * max(model.tokenizer.longest_piece_bytes, 1)]
    whole = model.tokenizer.encode(text, adds_special=True)
    bare = model.tokenizer.encode(text, adds_special=False)
    excess = len(whole) - limit
    if excess <= 0:
        return whole
    start = _position(bare, whole)
    kept = start + max(len(bare) - excess, 0)
    return whole[:kept] + whole[start + len(bare) :]


def _position(part: list[int], whole: list[int]) -> int:
    """Return the offset of the part in the whole, or the length of the whole."""
    starts = range(len(whole) - len(part) + 1)
    return next((i for i in starts if whole[i : i + len(part)] == part), len(whole))
