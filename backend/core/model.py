"""Facts about a loaded model, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from backend.core.prompt import MediaKind
from backend.core.scoring import DecisionProfile, EmbeddingProfile, RerankerKind, TagProfile


class ModelKind(Enum):
    """The kind of a network: a decoder continues text, the others only read it."""

    DECODER = "decoder"
    ENCODER = "encoder"
    CROSS_ENCODER = "cross-encoder"
    TAGGER = "token classifier"
    EXTRACTOR = "entity extractor"
    DECIDER = "decision model"

    @property
    def nature(self) -> str:
        """Its name with an article, and its purpose: for errors."""
        return _NATURES[self]


_NATURES = {
    ModelKind.DECODER: "a decoder: it generates",
    ModelKind.ENCODER: "an encoder: it embeds",
    ModelKind.CROSS_ENCODER: "a cross-encoder: it reranks",
    ModelKind.TAGGER: "a token classifier: it finds entities",
    ModelKind.EXTRACTOR: "an entity extractor: it finds the labels of a call",
    ModelKind.DECIDER: "a decision model: it answers questions of Score",
}


class Reuse(Enum):
    """Where a stored prefix can be reused: recurrent layers cannot be rewound, windows forget."""

    ANYWHERE = "anywhere"
    WITH_WINDOWS = "where the windows before are stored"
    AT_SNAPSHOTS = "where a snapshot was made"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts about a loaded model that outlive its weights.

    Attributes:
        name: The host's name for it, which requests carry.
        context_length: Limit of prompt plus reply, in tokens; `None` when the model sets none.
        vocab_size: Width of the logits: token ids are below it.
        attention_spans: Lengths of its attention windows and blocks, in tokens.
        batches: Whether several requests may be decoded together.
        reuse: Where a stored prefix can be reused.
        grammar_triggers: Words that activate a caller's grammar; without any it applies from
            the start.
        refused_media: Kinds of media that the model supports but this backend refuses, each with
            the reason.
        single_media: Kinds limited to one per prompt, each with the reason.
        decisions: How it answers questions, if it is a decision model.
        tagging: How a token classifier finds entities.
        draft_model: Directory of its draft model; empty for none.
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
    reuse: Reuse = Reuse.ANYWHERE
    grammar_triggers: tuple[str, ...] = ()
    embedding: EmbeddingProfile = field(default_factory=EmbeddingProfile)
    reranker: RerankerKind | None = None
    refused_media: Mapping[MediaKind, str] = field(default_factory=dict)
    single_media: Mapping[MediaKind, str] = field(default_factory=dict)
    kind: ModelKind = ModelKind.DECODER
    decisions: DecisionProfile | None = None
    tagging: TagProfile = field(default_factory=TagProfile)
    draft_model: str = ""
