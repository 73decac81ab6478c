"""Calls that generate nothing, their requests to the engine, and their results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from backend.core.prompt import Prompt
from backend.core.request import ComputeRequest, Remembered


class Pooling(Enum):
    """How token vectors become one vector; `NONE` keeps them all."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingProfile:
    """How a checkpoint computes embeddings, according to its own files.

    Attributes:
        is_normalized: Whether a pooled vector has length 1.
        obstacle: Why they cannot be computed; empty when they can.
    """

    pooling: Pooling = Pooling.MEAN
    is_normalized: bool = False
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """A parsed call: a text, or token ids where there is none."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class Embedding(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """Vectors of float32.

    Attributes:
        data: The vectors, concatenated, in this machine's byte order.
        is_pooled: Whether there is one vector for all tokens rather than one per token.
    """

    data: bytes
    dim: int
    is_pooled: bool
    prompt_tokens: int


class EmbeddingRequest(
    ComputeRequest[Embedding], frozen=True, kw_only=True, tag=True, array_like=True
):
    """A call in the engine's terms: at least one token id, all within the vocabulary."""

    token_ids: tuple[int, ...]
    pooling: Pooling
    is_normalized: bool


@dataclass(frozen=True, slots=True)
class ClassifyCall:
    """A text to search for entities.

    Attributes:
        threshold: Entities below this probability are left out.
        labels: Groups to find; empty for all that the model knows.
    """

    text: str
    threshold: float = 0.0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entity:
    """A span of text that belongs to a group, such as a person's name.

    Attributes:
        start: Offset of its first byte in the UTF-8 text.
        end: Offset after its last byte.
        probability: Mean over its tokens.
    """

    group: str
    start: int
    end: int
    probability: float
    text: str


@dataclass(frozen=True, slots=True)
class TokenLabel:
    """The most likely label of a token, as an index, and its probability."""

    label: int
    probability: float


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and its position: a character range, and the index of its word."""

    token_id: int
    start: int
    stop: int
    word: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBiases:
    """The addend of each kind of step between BIOES labels in the log-probability of a path."""

    background_stay: float = 0.0
    background_to_start: float = 0.0
    inside_to_continue: float = 0.0
    inside_to_end: float = 0.0
    end_to_background: float = 0.0
    end_to_start: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TagProfile:
    """How the outputs of a token classifier become entities.

    Attributes:
        labels: Of tokens, by index.
        biases: Of the steps of a path, if every text has the likeliest path of BIOES labels;
            `None` if every token has its likeliest label, and words belong together.
        reach: How many tokens ahead and back a label depends on; 0 if on the whole text.
    """

    labels: tuple[str, ...] = ()
    biases: PathBiases | None = None
    reach: int = 0


class Labels(Struct, frozen=True, tag=True, array_like=True):
    """The log-probabilities of labels, float32 [T, labels], in this machine's byte order."""

    logprobs: bytes


class ClassifyRequest(ComputeRequest[Labels], frozen=True, tag=True, array_like=True):
    """A text, or a part of one, as token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Words of a text, the first by index and the one after the last, and their label by index."""

    label: int
    start: int
    stop: int
    probability: float


class Spans(Struct, frozen=True, tag=True, array_like=True):
    """The likely spans of a text, which may overlap."""

    spans: tuple[Span, ...]


class ExtractRequest(ComputeRequest[Spans], frozen=True, kw_only=True, tag=True, array_like=True):
    """Labels and a text, or a part of one, as token ids.

    Attributes:
        words: Places of the first token of each word, at least one.
        labels: Places of the marks of the labels, at least one.
        threshold: Spans below this probability are left out.
    """

    token_ids: tuple[int, ...]
    words: tuple[int, ...]
    labels: tuple[int, ...]
    threshold: float


class QuestionType(Enum):
    """A kind of question: which option, which level of ascending ones, or whether it is so."""

    CHOICE = "choice"
    SCORE = "score"
    BOOL = "bool"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionProfile:
    """How a decision model answers.

    Attributes:
        temperatures: Of the softmax over options, by type of question, or `type:options` for some
            numbers of options; 1 for others.
        question_tokens: Limit of a question with its options, if config.json sets one.
        isolates_levels: Whether each level of a score is asked about by itself.
    """

    temperatures: Mapping[str, float] = field(default_factory=dict)
    question_tokens: int = 0
    isolates_levels: bool = False

    def temperature(self, question_type: QuestionType, options: str) -> float:
        """Return the temperature for a number of options, as `temperatures` names it."""
        own = self.temperatures.get(question_type.value, 1.0)
        return self.temperatures.get(f"{question_type.value}:{options}", own)


class Decision(Struct, frozen=True, tag=True, array_like=True):
    """The logits of the options of a question.

    Attributes:
        act: The probability that acting on the answer is right, of models that know it.
    """

    logits: tuple[float, ...]
    act: float | None = None


class DecideRequest(ComputeRequest[Decision], frozen=True, kw_only=True, tag=True, array_like=True):
    """A question with its options and a text, as token ids.

    Attributes:
        options: Where each option begins and ends, or the mask before it; at least two.
        question: Where the question begins and ends, for a network that reads it by itself.
    """

    token_ids: tuple[int, ...]
    options: tuple[tuple[int, int], ...]
    question_type: QuestionType
    question: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """A prompt and its possible continuations.

    Attributes:
        stable_prefix_bytes: Bytes of the prompt, in UTF-8, that later calls will share; 0 if
            unknown.
        question_type: `None` for continuations, which only a decision model does not score.
    """

    prompt: str
    candidates: tuple[str, ...]
    stable_prefix_bytes: int = 0
    question_type: QuestionType | None = None


class Scores(Struct, frozen=True, tag=True, array_like=True):
    """The log-probabilities (natural) of each continuation's tokens."""

    logprobs: tuple[tuple[float, ...], ...]


class ScoreRequest(ComputeRequest[Scores], frozen=True, kw_only=True, tag=True, array_like=True):
    """A request for the token log-probabilities of every continuation.

    Attributes:
        prompt: Precedes every continuation; computed once.
        continuations: Each has at least one token; an empty tuple computes only the prompt.
        remembered: Whether the prompt may enter the prompt cache.
    """

    request_id: str
    prompt: Prompt
    continuations: tuple[tuple[int, ...], ...]
    remembered: Remembered = Remembered.ALL


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text and its log-probability (natural) given the tokens before it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate's tokens, at least one."""

    tokens: tuple[ScoredToken, ...]

    @property
    def logprob(self) -> float:
        """Log-probability (natural) of the whole candidate."""
        return sum(token.logprob for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token."""
        return self.logprob / len(self.tokens)


class RerankerKind(Enum):
    """A family of generative rerankers, with its own prompt and answers."""

    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankCall:
    """A query, and documents to order by relevance to it; `max_results` `None` means all."""

    query: str
    documents: tuple[str, ...]
    max_results: int | None = None


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A query and a document as token ids for a cross-encoder.

    Attributes:
        segment_ids: 0 or 1 per token, for query or document; empty if the tokenizer sets none.
    """

    token_ids: tuple[int, ...]
    segment_ids: tuple[int, ...] = ()


class Judgement(Struct, frozen=True, tag=True, array_like=True):
    """A cross-encoder's logit of each pair."""

    logits: tuple[float, ...]


class JudgeRequest(ComputeRequest[Judgement], frozen=True, tag=True, array_like=True):
    """A request for a cross-encoder's logit of each pair."""

    pairs: tuple[TokenPair, ...]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, its index in the call, and its relevance between 0 and 1."""

    index: int
    text: str
    relevance: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, most relevant first, and the number of tokens read."""

    documents: tuple[RankedDocument, ...]
    prompt_tokens: int
