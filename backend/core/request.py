"""A generation as its caller requests it (`GenerationCall`) and in tokens (`GenerationRequest`).

Both hold the same `GenerationParams`.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Generic, TypeVar

from msgspec import Struct

from backend.core.guide import Guide, ReplyGrammar
from backend.core.prompt import JsonValue, Medium, Message, Prompt, Tool, ToolChoice, ToolMode

ResultT_co = TypeVar("ResultT_co", covariant=True)

# Below it, scaled logits leave the range of float32.
MIN_TEMPERATURE = 1e-5


def new_id() -> str:
    """Return an id that no other request or job has."""
    return uuid.uuid4().hex[:12]


class Remembered(Enum):
    """The part of a request that may enter the prompt cache."""

    NOTHING = "nothing"
    PROMPT = "prompt"
    ALL = "all"


class CacheHint(Enum):
    """The caller's hint about the requests that follow this one."""

    NONE = "none"
    KEEP = "keep"
    ONCE = "once"


class Priority(IntEnum):
    """The order of competing requests; the smallest number goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Every default switches its part off.

    Attributes:
        temperature: 0 means greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely one.
        xtc_probability: Chance per token of removing the likeliest candidates.
        xtc_threshold: Probability from which a token counts as such a candidate.
        repetition_penalty: Divides positive and multiplies negative logits of seen tokens.
        presence_penalty: Subtracted once from the logit of a seen token.
        frequency_penalty: Subtracted per occurrence from the logit of a seen token.
        penalty_window: Latest tokens, prompt included, that count as seen; 0 means all.
        logit_bias: Added to the logits, by token id.
        seed: Together with the position, determines every draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether every draw is the most likely token, regardless of the seed."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether a penalty or a bias changes the distribution before the draw."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The engine's part of a call: travels unchanged from the parser to the row.

    A new field is parsed in `rpc/parsing/generation_fields` and used where a row is: nothing
    copies fields.

    Attributes:
        request_id: The caller's, made unique.
        max_tokens: Limit of generated tokens; `None` means up to the context length.
        top_logprobs: Alternatives per token; `None` means no logprobs at all.
        remembered: The part that may enter the prompt cache.
        cache_hint: Whether the conversation will continue.
        cache_path: The caller's path on disk for its prefix; empty for none.
        priority: Its rank when not all requests can run at once.
        may_speculate: Whether its tokens may be drafted; replies do not depend on it.
        max_draft_tokens: Limit of a draft's length; `None` uses the model's option.
    """

    request_id: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    top_logprobs: int | None = None
    remembered: Remembered = Remembered.ALL
    cache_hint: CacheHint = CacheHint.NONE
    cache_path: str = ""
    priority: Priority = Priority.NORMAL
    may_speculate: bool = True
    max_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """A parsed and validated call, not yet rendered: its text, and how the reply is read.

    Attributes:
        prompt: Raw text; ignored when there are messages.
        continues: Whether the reply goes on with the last message, a text of the assistant's.
        media: Images, sounds and videos, in order.
        template_options: Template variables besides messages and tools (`enable_thinking`,
            `reasoning_effort`, ...); a missing key stays undefined in the template.
        grammar: GBNF or a JSON schema that the reply must follow; wins over `tool_choice`.
        parallel_tool_calls: Whether a reply may hold more than one call.
        constrains_calls: Whether calls that the model makes of its own accord must follow their
            schemas.
        thinking_budget: Limit of thinking tokens; `None` means no limit.
        cache_scope: Prefixes stored by this call are invisible to other scopes; see `Prompt`.
        shares_system_prompt: Whether other scopes share the system prompt and tools anyway.
        debug: Whether the log may hold the text of this request.
    """

    params: GenerationParams
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    continues: bool = False
    media: tuple[Medium, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template_options: Mapping[str, JsonValue] = field(default_factory=dict)
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    parallel_tool_calls: bool = True
    constrains_calls: bool = True
    thinking_budget: int | None = None
    cache_scope: str = ""
    shares_system_prompt: bool = False
    debug: bool = False
    size_bytes: int = 0

    @property
    def request_id(self) -> str:
        """That of the parameters."""
        return self.params.request_id

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Tools that the model sees and may call."""
        return () if self.tool_choice.mode is ToolMode.NONE else self.tools

    @property
    def offers_calls(self) -> bool:
        """Whether the model may call a tool in a conversation, which a raw prompt is not."""
        return bool(self.messages and self.shown_tools)

    @property
    def demands_calls(self) -> bool:
        """Whether the tool choice demands a call."""
        return self.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    @property
    def is_ruled(self) -> bool:
        """Whether the caller's grammar rules the answer; a demanded call wins over it."""
        return bool(self.grammar) and not (self.offers_calls and self.demands_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A call in the engine's terms: the caller's parameters, and the server's part of the work.

    Attributes:
        room: Tokens that the context has left after the prompt; at least 1.
        stop_token_ids: Ids that end generation; empty when the caller ignores them.
        guide: The rule and the thinking budget of the reply, if any.
        grammar: Made of the guide by the engine.
        caller: Whose request it is, for fair turns; empty if that is unknown.
    """

    params: GenerationParams
    prompt: Prompt
    room: int
    stop_token_ids: frozenset[int] = frozenset()
    guide: Guide | None = None
    grammar: ReplyGrammar | None = None
    caller: str = ""

    @property
    def request_id(self) -> str:
        """That of the parameters."""
        return self.params.request_id

    @property
    def max_tokens(self) -> int:
        """The most tokens of its reply, at least 1."""
        return min(self.params.max_tokens or self.room, self.room)

    @property
    def is_open_ended(self) -> bool:
        """Whether only the context sets that limit."""
        return self.params.max_tokens is None or self.params.max_tokens > self.room


class ComputeRequest(Struct, Generic[ResultT_co], frozen=True):
    """A request that the model answers in one piece, between generation steps.

    Its parameter is the type of its result.
    """
