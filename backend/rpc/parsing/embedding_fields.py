"""The fields of Embedding: requests to calls, embeddings to results."""

from backend.config import MAX_TOKEN_IDS
from backend.core.embedding import Embedding, EmbeddingCall
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.limits import require_at_most

_MEDIA_FIELDS = ("Images", "Audios", "Videos")


def embedding_call(request: pb.PredictOptions) -> EmbeddingCall:
    """Return the call; the text wins over ids.

    Raises:
        InvalidRequestError: Neither is given, there are too many ids, or there are media.
    """
    for field in _MEDIA_FIELDS:
        if getattr(request, field):
            raise InvalidRequestError(field, "cannot be embedded: Embedding reads text only")
    require_at_most("EmbeddingTokens", request.EmbeddingTokens, MAX_TOKEN_IDS)
    if not request.Embeddings and not request.EmbeddingTokens:
        raise InvalidRequestError("Embeddings", "is empty, and so is EmbeddingTokens")
    return EmbeddingCall(text=request.Embeddings, token_ids=tuple(request.EmbeddingTokens))


def embedding_result(embedding: Embedding) -> pb.EmbeddingResult:
    """Return the vectors and their layout."""
    layout = pb.EMBEDDING_LAYOUT_FINAL if embedding.is_pooled else pb.EMBEDDING_LAYOUT_PER_TOKEN
    return pb.EmbeddingResult(
        embeddings=embedding.values,
        tokens=len(embedding.values) // embedding.dim,
        dim=embedding.dim,
        prompt_tokens=embedding.prompt_tokens,
        layout=layout,
    )
