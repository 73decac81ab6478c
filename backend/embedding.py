"""The pipeline of Embedding: a text, or token ids, to vectors."""

import asyncio
import logging
import time

from backend.config import MAX_TOKEN_IDS
from backend.core.embedding import Embedding, EmbeddingCall, EmbeddingRequest, Pooling
from backend.errors import InvalidRequestError, UnsupportedError
from backend.intake import (
    SideEngine,
    loaded,
    require_fit,
    require_ids,
    require_possible_fit,
    require_same,
)
from backend.model.loaded import LoadedModel

log = logging.getLogger(__name__)


async def embed(call: EmbeddingCall, engine: SideEngine) -> Embedding:
    """Return the vector of a text, or with `pooling:none` of every token; cancel to leave.

    Raises:
        InvalidRequestError: There is nothing to read, an id is outside the vocabulary, or the
            input is longer than the context, or than any may be.
        RequestCancelledError: Another model was loaded before the engine had the text.
        UnsupportedError: The loaded model cannot do it, and why.
    """
    started = time.monotonic()
    model, tuning = loaded(engine)
    profile = model.card.embedding
    if profile.obstacle:
        raise UnsupportedError(f"Embedding: {profile.obstacle}")
    token_ids = await asyncio.to_thread(_token_ids, call, model, truncates=tuning.truncate)
    pooling = Pooling(tuning.pooling) if tuning.pooling else profile.pooling
    request = EmbeddingRequest(
        token_ids=tuple(token_ids),
        pooling=pooling,
        is_normalized=profile.is_normalized and pooling is not Pooling.NONE,
    )
    require_same(model, engine.model)
    embedding = await engine.embed(request)
    seconds = time.monotonic() - started
    log.info("embedding prompt_tokens=%d ms=%.0f", len(token_ids), seconds * 1000.0)
    return embedding


def _token_ids(call: EmbeddingCall, model: LoadedModel, *, truncates: bool) -> list[int]:
    """Return what the model reads: a text gets the special tokens that its tokenizer adds."""
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


def _truncated(text: str, model: LoadedModel) -> list[int]:
    """Return the beginning of a text's tokens; special tokens around it stay."""
    limit = model.card.context_length
    if limit is None:
        return model.tokenizer.encode(text, adds_special=True)
    # What lies far beyond the limit need not be tokenised to be cut.
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
    """Return where the part begins; the end of the whole if it is not in it."""
    starts = range(len(whole) - len(part) + 1)
    return next((i for i in starts if whole[i : i + len(part)] == part), len(whole))
