"""Facts about a loaded model, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from backend.core.embedding import EmbeddingProfile
from backend.core.media import MediaKind
from backend.core.scoring import RerankerKind


class ModelKind(Enum):
    """The kind of a network: a decoder continues text, the others only read it."""

    DECODER = "decoder"
    ENCODER = "encoder"
    CROSS_ENCODER = "cross-encoder"
    TAGGER = "token classifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts about a loaded model that outlive its weights.

    Attributes:
        name: The host's name for it: the identity that requests carry.
        path: Directory it was loaded from.
        context_length: Prompt and reply together, in tokens; `None` when the model sets no limit.
        vocab_size: Width of the logits: token ids are below it.
        weights_bytes: Size of the weights in memory.
        attention_spans: How far its windows and blocks of attention reach, in tokens.
        batches: Whether several requests may decode together.
        reuses_at_boundaries_only: Whether a part of a prompt can be reused only up to where the
            model's state was kept: recurrent layers cannot go back.
        grammar_triggers: Words from which on a caller's grammar holds; without any it holds from
            the beginning.
        embedding: How its checkpoint turns a text into a vector.
        refused_media: Kinds of media that the model reads and this backend may not give it, each
            with the reason.
        single_media: Kinds of which a prompt may hold one, each with the reason.
        reranker: The family of rerankers that it belongs to, if any.
        labels: Of tokens, by their numbers; none unless it is a token classifier.
        draft_model: The directory of the model that drafts for it; empty for none.
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
    attention_spans: frozenset[int] = frozenset()
    batches: bool = True
    reuses_at_boundaries_only: bool = False
    grammar_triggers: tuple[str, ...] = ()
    embedding: EmbeddingProfile = field(default_factory=EmbeddingProfile)
    reranker: RerankerKind | None = None
    refused_media: Mapping[MediaKind, str] = field(default_factory=dict)
    single_media: Mapping[MediaKind, str] = field(default_factory=dict)
    kind: ModelKind = ModelKind.DECODER
    labels: tuple[str, ...] = ()
    draft_model: str = ""
