"""What is known of a loaded model, in plain values."""

from dataclasses import dataclass, field
from enum import Enum

from backend.core.embedding import EmbeddingProfile
from backend.core.scoring import RerankerKind


class ModelKind(Enum):
    """What a network does with text: a decoder goes on with it, the others read it only."""

    DECODER = "decoder"
    ENCODER = "encoder"
    CROSS_ENCODER = "cross-encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts about a loaded model that need no model to be told.

    Attributes:
        name: The host's name for it: the identity that requests carry.
        path: Directory it was loaded from.
        context_length: Prompt and reply together, in tokens; `None` when the model sets no limit.
        vocab_size: Width of the logits: token ids are below it.
        weights_bytes: Size of the weights in memory.
        batches: Whether several requests may decode together.
        reuses_at_boundaries_only: Whether a part of a prompt can be reused only up to where the
            model's state was kept: recurrent layers cannot go back.
        grammar_triggers: Words from which on a caller's grammar holds; without any it holds from
            the beginning.
        embedding: How its checkpoint turns a text into a vector.
        reranker: The family of rerankers that it belongs to, if any.
    """

    name: str
    path: str
    model_type: str
    context_length: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    weights_bytes: int
    supports_tools: bool
    supports_thinking: bool
    batches: bool = True
    reuses_at_boundaries_only: bool = False
    grammar_triggers: tuple[str, ...] = ()
    embedding: EmbeddingProfile = field(default_factory=EmbeddingProfile)
    reranker: RerankerKind | None = None
    kind: ModelKind = ModelKind.DECODER
